"""Where configurations and run folders are: below `res/train_log` of the current folder, or of the project's checkout."""

from pathlib import Path

from piebridge.config import load_config, training_keys
from piebridge.core.errors import UserError
from piebridge.core.files import expand_user, read_json
from piebridge.core.names import closest

CONFIG_NAME = "config.yaml"
CONFIG_SUFFIXES = (".yaml", ".yml")


def project_roots():
    """The folders that may hold `res/`: the current one, then the checkout that this package runs from."""
    checkout = Path(__file__).resolve().parent.parent
    here = Path.cwd()
    return [here] if here == checkout else [here, checkout]


def find_config(run):
    """RUN (`efficientnet_lite0/Clipart10/ours`), a folder with a config.yaml, or a YAML file -> path of the configuration.

    Raises UserError that lists the closest runs, or says where configurations were looked for.
    """
    given = expand_user(run)
    if given.suffix in CONFIG_SUFFIXES and given.is_file():
        return given
    for folder in _candidates(given):
        if (folder / CONFIG_NAME).is_file():
            return folder / CONFIG_NAME
    raise UserError(_not_found(run, "no such run, configuration file or folder with a config.yaml"))


def find_run_folder(run):
    """RUN, or the folder of any finished or unfinished run -> its path. Raises UserError."""
    given = expand_user(run)
    for folder in _candidates(given):
        if (folder / "run.json").is_file():
            return folder
    for folder in _candidates(given):
        if (folder / CONFIG_NAME).is_file():
            raise UserError(f"{run}: has not been run yet (no run.json in {folder}); run: piebridge train {run}")
    raise UserError(_not_found(run, "no such run folder (a run folder holds a run.json)"))


def state_of(folder, run, words=()):
    """"finished" where `folder` holds a finished run of this configuration, else "to do"; UserError where it holds that of another."""
    record = read_json(Path(folder) / "run.json")
    if not isinstance(record, dict) or record.get("status") != "success":
        return "to do"
    found, wanted = [training_keys(each) for each in (record.get("config") or {}, load_config(find_config(run), list(words)).as_dict())]
    other = [f"{key} {found[key]} -> {wanted[key]}" for key in wanted if key in found and found[key] != wanted[key]]
    if other:
        raise UserError(f"{folder}: holds a finished run of another configuration ({'; '.join(other[:4])}); move it away, or replace it "
                        f"with: piebridge train {run} {' '.join(words)} output={folder} overwrite=true")
    return "finished"


def list_configs():
    """{run name: path} of every configuration below `res/train_log`; the current folder goes before the checkout."""
    found = {}
    for root in reversed(project_roots()):
        base = root / "res" / "train_log"
        for path in sorted(base.glob("**/" + CONFIG_NAME)):
            found[path.parent.relative_to(base).as_posix()] = path
    return dict(sorted(found.items()))


def results_folder():
    """`res` of the current folder if it has one, else of the checkout."""
    roots = project_roots()
    for root in roots:
        if (root / "res").is_dir():
            return root / "res"
    return roots[0] / "res"


def _candidates(given):
    yield given
    if not given.is_absolute():
        for root in project_roots():
            yield root / "res" / "train_log" / given


def _not_found(run, what):
    names = list(list_configs())
    if not names:
        return f"{run}: {what}; there is no res/train_log in the current folder either"
    return f"{run}: {what}{closest(run, names)}; `piebridge configs ls` lists all {len(names)}"

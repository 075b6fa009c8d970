"""The command line: verbs only. Each verb parses, calls the part that does the work, and prints what it returns.

Nothing heavy is imported before a verb needs it: `piebridge --help` answers at once, without torch.
"""

import csv
import logging
import sys

from piebridge.arguments import parse_arguments
from piebridge.console import configure_logging, exit_status
from piebridge.core.errors import UserError
from piebridge.core.files import expand_user
from piebridge.core.names import closest

LOG = logging.getLogger(__name__)


def train(arguments):
    from piebridge.config import load_config, parse_overrides
    from piebridge.run_paths import find_config

    load_config(find_config(arguments.run), arguments.words)  # what is wrong with it is said before torch is imported
    from piebridge.training import train as run

    result = run(arguments.run, **parse_overrides(arguments.words))
    accuracy = result.results["test_accuracy"]
    print(f"{result.method} on {result.dataset}: test accuracy {'n/a' if accuracy is None else f'{100 * accuracy:.2f} %'}, "
          f"{result.results['train_seconds']:.1f} s of training ({result.results['wall_seconds']:.1f} s in all)\n"
          f"run folder     {result.folder}\n"
          f"tuned network  {result.folder / 'tuned.safetensors'}")


def plan(arguments):
    from piebridge.config import load_config, parse_overrides
    from piebridge.run_paths import find_config

    load_config(find_config(arguments.run), arguments.words)
    from piebridge.plan_verb import plan as make_plan

    lines, _ = make_plan(arguments.run, **parse_overrides(arguments.words))
    print("\n".join(lines))


def predict(arguments):
    from piebridge.core.prediction import predict as classify
    from piebridge.run_paths import find_run_folder

    if not arguments.words:
        raise UserError(f"predict {arguments.run}: name at least one image or folder of images")
    if arguments.top < 1:
        raise UserError(f"--top {arguments.top}: a number of classes, at least 1")
    if hasattr(sys.stdout, "reconfigure"):  # since Python 3.7; a file's name may be no text at all, and goes out as it is
        sys.stdout.reconfigure(errors="surrogateescape")
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["path", "class", "probability"])
    for row in classify(find_run_folder(arguments.run), arguments.words, arguments.top):
        writer.writerow([row.path, row.class_name, f"{row.probability:.4f}"])


def table(arguments):
    if arguments.document is not None:
        from piebridge.report.results_document import update_document

        if arguments.words or arguments.markdown:
            raise UserError("--document FILE: the document names the folders itself; leave out RES_DIR, output= and --markdown")
        print(update_document(expand_user(arguments.document)))
        return
    from piebridge.report.results import collect
    from piebridge.report.table import build_rows, render_markdown, render_text, write_csv

    folder, output = _folder_and_output(arguments.words, "table.csv")
    runs = collect(folder)
    rows = build_rows(runs)
    print((render_markdown if arguments.markdown else render_text)(rows, runs))
    write_csv(rows, output)
    LOG.info("written: %s", output)


def compare(arguments):
    from piebridge.compare_verb import run

    form = "json" if arguments.json else "csv" if arguments.csv else "text"
    print(run(_existing(expand_user(arguments.res_dir)), expand_user(arguments.expected), arguments.tolerance, form))


def plot(arguments):
    from piebridge.report.plot import draw
    from piebridge.report.results import collect

    folder, output = _folder_and_output(arguments.words, "plot.png")
    print(draw(collect(folder), output))


def data(arguments):
    from piebridge.config_values import split_words
    from piebridge.core import data_catalogue

    if not arguments.name:
        print("\n".join(data_catalogue.describe()))
        return
    options = split_words(arguments.words)
    unknown = [key for key in options if key not in ("source", "output")]
    if unknown:
        raise UserError(f"{unknown[0]}={options[unknown[0]]}: unknown option{closest(unknown[0], ('source', 'output'))}; "
                        "known are source and output")
    print(data_catalogue.prepare(arguments.name, **options))


def forge(arguments):
    from piebridge.forge_verb import run

    print(run(arguments))


def engine(arguments):
    from piebridge.engine_verb import run

    print(run(arguments))


def configs(arguments):
    from piebridge.config_listing import describe_runs, describe_settings, show

    words = [arguments.run] + arguments.words if arguments.run else arguments.words
    if arguments.action == "show":
        if not words:
            raise UserError("configs show: name a run, for example: piebridge configs show efficientnet_lite0/Clipart10/ours")
        print(show(words[0], words[1:]), end="")
        return
    if words:
        raise UserError(f"configs {arguments.action}: takes no further words (got '{words[0]}')")
    print("\n".join(describe_runs() if arguments.action == "ls" else describe_settings()))


def doctor(arguments):
    from piebridge.core.doctor import examine, render

    report = examine()
    if arguments.json:
        import json

        print(json.dumps(report, indent=2))
    else:
        print(render(report))


VERBS = {
    "train": (train, "train one run, and save the tuned network"),
    "plan": (plan, "measure for at most a minute, and print what each way of training would cost"),
    "predict": (predict, "classify images with a run's tuned network"),
    "table": (table, "compare finished runs: accuracy, seconds, ratios, memory"),
    "compare": (compare, "set finished runs beside expected or published results"),
    "plot": (plot, "draw accuracy against training seconds"),
    "data": (data, "list, fetch or build data sets"),
    "forge": (forge, "make a proxy set from a network and unlabelled images; show or profile one"),
    "engine": (engine, "a compiled, sparse training step: its memory before it runs, schemes, programs, timings"),
    "configs": (configs, "list runs, show a run's configuration, explain the keys"),
    "doctor": (doctor, "say what this machine has, and what is missing"),
}


def parse(argv):
    """Arguments of the verb in `argv`. Raises UserError, in one line, for anything that is wrong with them."""
    return parse_arguments(argv, VERBS)


def _folder_and_output(words, name):
    """`[RES_DIR] [output=FILE]` -> (folder that exists, file to write)."""
    from piebridge.run_paths import results_folder

    folder, output = None, None
    for word in words:
        if word.startswith("output="):
            output = expand_user(word[len("output="):])
        elif folder is None:
            folder = expand_user(word)
        else:
            raise UserError(f"'{word}': one folder at a time ('{folder}' is given already)")
    folder = _existing(folder or results_folder())
    return folder, output or folder / name


def _existing(folder):
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; name one that holds run folders, such as res")
    return folder


def main(argv=None):
    """Run one command and return its exit status: 0, 1 failed, 2 bad usage or input, 130 interrupted."""
    argv = sys.argv[1:] if argv is None else list(argv)

    def action():
        arguments = parse(argv)
        if arguments.verb is None:
            raise UserError("name a verb: " + ", ".join(VERBS) + "; see `piebridge --help`")
        configure_logging(arguments.more - arguments.less)
        arguments.action_of_verb(arguments)

    return exit_status(action)


if __name__ == "__main__":
    sys.exit(main())

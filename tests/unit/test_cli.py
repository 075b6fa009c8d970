"""The command line: what it answers, how fast it gets there, and how it says that something is wrong."""

import logging
import subprocess
import sys

import pytest

from piebridge import __version__
from piebridge.cli import VERBS, main, parse
from piebridge.console import exit_status
from piebridge.core.errors import Cancelled, RunFailed, UserError

pytestmark = pytest.mark.usefixtures("logger_as_before")
HEAVY = ("torch", "torchvision", "numpy", "pandas", "yaml", "matplotlib", "PIL", "tqdm")


def run_cli(*argv, **options):
    return subprocess.run([sys.executable, "-m", "piebridge"] + list(argv), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          universal_newlines=True, **options)


def test_help_and_version_import_nothing_heavy():
    code = ("import sys; from piebridge.cli import main, VERBS\n"
            "assert main(['--version']) == main(['--help']) == 0\n"
            "assert all(main([verb, '--help']) == 0 for verb in VERBS)\n"
            f"print('HEAVY', [name for name in {HEAVY!r} if name in sys.modules])")
    output = subprocess.check_output([sys.executable, "-c", code], universal_newlines=True)
    assert output.splitlines()[0] == f"piebridge {__version__}"
    assert output.splitlines()[-1] == "HEAVY []"


@pytest.mark.parametrize("verb", VERBS)
def test_each_help_has_examples_that_parse(verb, capsys):
    assert main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    examples = [line.strip() for line in text.split("examples:")[1].splitlines() if line.strip().startswith("piebridge ")]
    assert examples
    for example in examples:
        words = example.split("   ")[0].split(">")[0].split()
        assert parse(words[1:]).verb == verb
    assert max(len(line) for line in text.splitlines()) <= 130


def test_the_module_and_the_command_are_the_same():
    result = run_cli("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"piebridge {__version__}\n", "")


@pytest.mark.parametrize("argv, message", [
    (["trian"], "unknown verb 'trian' (did you mean 'train'?); the verbs are train, plan, predict,"),
    (["xyzzy"], "unknown verb 'xyzzy'; the verbs are train, plan, predict,"),
    ([], "name a verb: train, plan, predict,"),
    (["train"], "the following arguments are required: RUN; see `piebridge train --help`"),
    (["train", "a", "--epochs", "3"], "unknown option --epochs; write settings as key=value, such as epochs=...; see `piebridge"),
    (["table", "--fast"], "unknown option --fast; see `piebridge table --help`"),
    (["--fast"], "unknown option --fast; see `piebridge --help`"),
    (["doctor", "now"], "unexpected word 'now'; see `piebridge doctor --help`"),
    (["predict", "somewhere"], "predict somewhere: name at least one image or folder of images"),
    (["predict", "somewhere", "a.jpg", "--top", "0"], "--top 0: a number of classes, at least 1"),
    (["predict", "somewhere", "a.jpg", "--top", "many"], "argument --top: invalid int value: 'many'; see `piebridge predict"),
    (["configs", "list"], "argument ls|show|keys: invalid choice: 'list'"),
    (["configs", "show"], "configs show: name a run"),
    (["configs", "keys", "epochs"], "configs keys: takes no further words (got 'epochs')"),
    (["table", "no/such/folder"], "no/such/folder: no such folder"),
    (["train", "efficientnet_lite0/Clipart10/ours", "config_or_run=x"], "command line: config_or_run: unknown key; `piebridge configs"),
    (["train", "efficientnet_lite0/Clipart10/ours", "backend.name=opnvino"], "(did you mean 'openvino'?)"),
    (["data", "DTD", "name=y"], "name=y: unknown option; known are source and output"),
    (["data", "DTD", "sourse=x"], "sourse=x: unknown option (did you mean 'source'?); known are source and output"),
    (["data", "DTD", "source"], "'source' is not an override: write key=value"),
    (["configs", "show", "efficientnet_lite0/Clipart10/our"], "(did you mean 'efficientnet_lite0/Clipart10/ours'?)"),
    (["configs", "show", "efficientnet_lite0/Clipart10/ours", "epoch=3"], "did you mean 'epochs'?"),
    (["configs", "show", "efficientnet_lite0/Clipart10/ours", "epochs"], "'epochs' is not an override: write key=value"),
])
def test_bad_usage_is_one_line_and_exit_status_2(argv, message, capsys):
    assert main(argv) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert message in output.err
    assert output.err.startswith("piebridge: ") and output.err.count("\n") == 1


def test_every_problem_of_a_configuration_is_a_line(capsys):
    assert main(["configs", "show", "efficientnet_lite0/Clipart10/ours", "epochs=0", "seed=-1", "nonsense=1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("piebridge: command line: ") for line in lines)


@pytest.mark.parametrize("error, status, line", [
    (UserError("a.yaml: wrong"), 2, "piebridge: a.yaml: wrong"),
    (RunFailed("the loss is not a number"), 1, "piebridge: the loss is not a number"),
    (Cancelled("interrupted by SIGINT"), 130, "piebridge: interrupted by SIGINT"),
    (KeyboardInterrupt(), 130, "piebridge: interrupted"),
    (OSError(28, "No space left on device", "run.json"), 1, "piebridge: run.json: No space left on device"),
    (ModuleNotFoundError("No module named 'torch'", name="torch"), 2, "piebridge: torch is not installed: pip install torch"),
    (ModuleNotFoundError("No module named 'tqdm.auto'", name="tqdm.auto"), 2, "piebridge: the Python package that provides 'tqdm.auto'"),
    (ModuleNotFoundError("No module named 'piebridge.x'", name="piebridge.x"), 1, "piebridge: No module named 'piebridge.x' (PIEBRIDGE_D"),
    (ImportError("libgomp.so.1: cannot open", name="torch"), 1, "piebridge: libgomp.so.1: cannot open (PIEBRIDGE_DEBUG=1"),
    (ZeroDivisionError("division\nby zero"), 1, "piebridge: unexpected ZeroDivisionError: division by zero (PIEBRIDGE_DEBUG=1"),
])
def test_each_way_to_end_has_its_exit_status(error, status, line, capsys, monkeypatch):
    def fail():
        raise error

    monkeypatch.delenv("PIEBRIDGE_DEBUG", raising=False)
    assert exit_status(fail) == status
    text = capsys.readouterr().err
    assert text.startswith(line) and text.count("\n") == 1
    monkeypatch.setenv("PIEBRIDGE_DEBUG", "1")
    assert exit_status(fail) == status
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("module, words", [("piebridge", ["train"]), ("piebridge.training", [])])
def test_without_torch_training_ends_in_one_line(module, words):
    code = ("import runpy, sys; sys.modules['torch'] = None\n"
            f"sys.argv[1:] = {words + ['efficientnet_lite0/Clipart10/ours']!r}\n"
            f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)")
    result = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("piebridge: torch is not installed: pip install torch torchvision (on a Jetson")


def test_a_reader_that_stops_reading_is_no_error():
    command = [sys.executable, "-m", "piebridge", "configs", "keys"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()  # as `| head` does; long before Python has started
    error = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), error) == (141, b"")


def test_options_and_words_come_in_any_order(tmp_path):
    for argv in ("--markdown res output=t.csv", "res --markdown output=t.csv", "res output=t.csv --markdown"):
        arguments = parse(["table"] + argv.split())
        assert arguments.markdown and arguments.words == ["res", "output=t.csv"]
    for argv in ("-v train run epochs=3", "train -v run epochs=3", "train run -v epochs=3", "train run epochs=3 -v"):
        arguments = parse(argv.split())
        assert (arguments.more, arguments.less, arguments.run, arguments.words) == (1, 0, "run", ["epochs=3"])
    assert parse(["train", "run", "optimizer.lr=-1"]).words == ["optimizer.lr=-1"]


def test_configs_show_has_every_key_with_overrides_applied(capsys):
    import yaml

    from piebridge.config import known_keys

    assert main(["configs", "show", "efficientnet_lite0/Clipart10/ours", "epochs=3", "optimizer.lr=1e-4", "data=My Photos"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["epochs"], shown["optimizer"]["lr"], shown["data"], shown["method"]) == (3, 1e-4, "My Photos", "ours")
    flat = set()
    for name, value in shown.items():
        flat |= {f"{name}.{inner}" for inner in value} if isinstance(value, dict) else {name}
    assert flat == set(known_keys())
    assert main(["configs", "keys"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(known_keys())


def test_runs_are_found_from_another_folder_and_local_ones_go_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["configs", "ls"]) == 0
    shipped = capsys.readouterr().out.splitlines()
    assert any(line.startswith("efficientnet_lite0/Clipart10/ours ") for line in shipped)
    own = tmp_path / "res" / "train_log" / "efficientnet_lite0" / "Clipart10" / "ours"
    own.mkdir(parents=True)
    (own / "config.yaml").write_text("# mine\nmethod: PET\nepochs: 77\n")
    assert main(["configs", "ls"]) == 0
    assert "mine" in capsys.readouterr().out
    for run in ("efficientnet_lite0/Clipart10/ours", str(own), str(own / "config.yaml")):
        assert main(["configs", "show", run]) == 0
        assert "epochs: 77" in capsys.readouterr().out


def test_verbosity_goes_to_stderr(capsys, tmp_path):
    (tmp_path / "run.json").write_text('{"status": "running", "config": {}}')
    assert main(["table", str(tmp_path)]) == 0
    assert capsys.readouterr().err == f"written: {tmp_path / 'table.csv'}\n"
    assert main(["-q", "table", str(tmp_path)]) == 0
    assert capsys.readouterr().err == ""
    logging.getLogger("piebridge.core.any").warning("watch out")
    assert capsys.readouterr().err == "warning: watch out\n"


def test_data_without_a_name_lists_what_there_is(capsys):
    assert main(["data"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("Clipart10", "Openclipart", "Caltech101", "Caltech256", "DogsVsCats", "DTD"))
    assert main(["data", "Openclipar"]) == 2
    assert "did you mean 'Openclipart'?" in capsys.readouterr().err


def test_prediction_from_what_is_not_a_run(tmp_path, capsys):
    assert main(["predict", str(tmp_path), "a.jpg"]) == 2
    assert "no such run folder (a run folder holds a run.json)" in capsys.readouterr().err
    (tmp_path / "run.json").write_text('{"status": "running", "config": {}}')
    assert main(["predict", str(tmp_path), "a.jpg"]) == 2
    assert f"{tmp_path}: no tuned network here (status: running); finish the training first" in capsys.readouterr().err

"""The shell scripts: clean to shellcheck, and calm and right about what is finished, failed, missing or stopped."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from piebridge.config import load_config

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "scripts").glob("**/*.sh")) + [".ci/run"]
PROGRAMS = [name for name in SCRIPTS if name not in ("scripts/lib.sh", ".ci/run")]
GENERAL = ("setup", "quickstart", "test", "downloading", "run_e2e", "run_ours", "run_baselines", "measure")
DATASETS = {"openclipart": "Openclipart", "caltech101": "Caltech101", "caltech256": "Caltech256", "dogsvscats": "DogsVsCats",
            "dtd": "DTD"}


def run_bash(*words, cwd, **variables):
    """(exit status, stdout, stderr); the scripts use the interpreter that runs the tests."""
    environment = dict(os.environ, PIEBRIDGE_VENV=sys.prefix)
    environment.update(variables)
    environment.pop("PYTHONPATH", None)
    result = subprocess.run(["bash"] + [str(word) for word in words], cwd=str(cwd), env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, universal_newlines=True)
    return result.returncode, result.stdout, result.stderr


def run_with_lib(checkout, code):
    return run_bash("-c", f'. "$1/scripts/lib.sh"\n{code}', "bash", checkout, cwd="/")


def test_the_list_is_what_the_documents_name():
    assert set(PROGRAMS) == ({f"scripts/{name}.sh" for name in GENERAL}
                             | {f"scripts/run_standalone_datasets/run_{name}.sh" for name in DATASETS})


@pytest.mark.parametrize("script", SCRIPTS)
def test_syntax_and_shellcheck(script):
    subprocess.check_call(["bash", "-n", str(ROOT / script)])
    shellcheck = shutil.which("shellcheck", path=os.path.join(sys.prefix, "bin") + os.pathsep + os.environ["PATH"])
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (it is in the extra `dev`)")
    result = subprocess.run([shellcheck, "--external-sources", script], cwd=str(ROOT), stdout=subprocess.PIPE,
                            universal_newlines=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("script", PROGRAMS)
def test_each_starts_with_what_it_does_needs_and_takes(script):
    lines = (ROOT / script).read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    header = [line for line in lines[1:lines.index("set -euo pipefail")]]
    assert all(line.startswith("# ") for line in header)
    text = " ".join(header)
    assert ("Takes:" in text or "Needs:" in text) and f"bash {script}" in text
    assert os.access(str(ROOT / script), os.X_OK)


def test_ci_runs_the_tests_and_nothing_else():
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert commands[-1] == "exec bash scripts/test.sh" and len(commands) == 3


def test_what_is_finished_is_skipped_and_what_fails_is_named(checkout):
    done = checkout / "res" / "done"
    done.mkdir()
    (done / "run.json").write_text('{\n  "status": "success"\n}\n')
    status, out, err = run_with_lib(checkout, "train res/done efficientnet_lite0/Clipart10/ours\n"
                                              "train 'res/with a space' efficientnet_lite0/Clipart10/no_such_method\n"
                                              "train res/other no/such/run\nsay 'still here'\nfinish")
    assert status == 1
    assert out.splitlines() == ["done already: res/done", "training: res/with a space", "training: res/other", "still here"]
    assert err.splitlines()[-2:] == ["failed: res/with a space", "failed: res/other"]
    assert "no such run" in err


def test_an_interrupted_run_stops_the_script(checkout):
    status, out, err = run_with_lib(checkout, "piebridge() { return 130; }\ntrain res/a some/run\nsay 'not reached'")
    assert (status, out, err) == (130, "training: res/a\n", "stopped; the same command goes on from here\n")


def test_seeds_have_the_folders_that_the_tables_look_in(checkout):
    code = "piebridge() { echo \"$@\"; }\nSEEDS='0 2'\ntrain_seeds efficientnet_lite0/Clipart10/PET epochs=1\nfinish"
    status, out, _ = run_with_lib(checkout, code)
    run = "efficientnet_lite0/Clipart10/PET"
    assert status == 0
    assert out.splitlines()[1::2] == [f"train {run} output=res/train_log/{run} seed=0 epochs=1",
                                      f"train {run} output=res/train_log/{run}/seed_2 seed=2 epochs=1"]


@pytest.mark.parametrize("script", ("quickstart.sh", "measure.sh", "run_e2e.sh", "run_standalone_datasets/run_dtd.sh"))
def test_help_says_what_a_script_does_and_does_nothing(checkout, script):
    status, out, err = run_bash(checkout / "scripts" / script, "--help", cwd="/", PIEBRIDGE_VENV="/nowhere")
    assert (status, err) == (0, "") and "Usage: bash scripts/" in out and "set -euo" not in out
    status, out, err = run_bash(checkout / "scripts" / script, "--halp", cwd="/")
    assert (status, out, err) == (2, "", "--halp: unknown option; --help says what there is\n")


def test_an_environment_that_is_not_there_is_one_line(checkout):
    status, out, err = run_bash(checkout / "scripts" / "run_ours.sh", cwd="/", PIEBRIDGE_VENV="/nowhere")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("PIEBRIDGE_VENV=/nowhere: no environment with Python and torch")


def test_a_finished_run_of_another_configuration_is_not_taken_for_this_one(checkout):
    run = "efficientnet_lite0/Clipart10/ours"
    folder = checkout / "res" / "train_log" / run
    config = load_config(folder / "config.yaml").as_dict()
    for epochs, expected in ((config["epochs"], (0, "finished\n", "")), (3, (2, "", "epochs 3 -> 12"))):
        (folder / "run.json").write_text(json.dumps({"status": "success", "config": dict(config, epochs=epochs)}))
        status, out, err = run_with_lib(checkout, f"state_of res/train_log/{run} {run}")
        assert (status, out) == expected[:2] and expected[2] in err
    (folder / "run.json").unlink()
    assert run_with_lib(checkout, f"state_of res/train_log/{run} {run}") == (0, "to do\n", "")


def test_no_gpu_is_one_line_and_a_wrong_number_an_error(checkout):
    status, out, err = run_with_lib(checkout, "choose_device 0\necho $CUDA_VISIBLE_DEVICES")
    assert status == 0 and err == ""
    assert out in ("0\n", "No CUDA GPU here with number 0: running on the CPU.\n0\n")
    status, out, err = run_with_lib(checkout, "choose_device cpu")
    assert (status, out, err) == (2, "", "the GPU is given by its number, for example 0; not: cpu\n")


@pytest.mark.parametrize("name", DATASETS)
def test_a_data_set_that_is_not_here_says_how_to_get_it(checkout, name):
    script = checkout / "scripts" / "run_standalone_datasets" / f"run_{name}.sh"
    status, out, err = run_bash(script, cwd="/")
    assert (status, err) == (2, "")
    assert out == f"{DATASETS[name]} is not here; get it with: bash scripts/downloading.sh {DATASETS[name]}\n"


def test_downloading_leaves_what_is_there_alone(checkout):
    mine = checkout / "datasets" / "Openclipart" / "mine" / "photo.jpg"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    status, out, err = run_bash(checkout / "scripts" / "downloading.sh", "Clipart10", "Openclipart", "Nonsense", cwd="/")
    assert status == 1
    assert "Clipart10 is there already" in out and "Openclipart is there already" in out
    assert err.splitlines()[-1] == "failed: Nonsense"
    assert mine.read_text() == "mine"


def test_setup_says_what_it_needs(checkout):
    script = checkout / "scripts" / "setup.sh"
    status, _, err = run_bash(script, cwd="/", PIEBRIDGE_VENV="", PIEBRIDGE_PYTHON="/no/such/python")
    assert (status, err) == (2, "PIEBRIDGE_PYTHON=/no/such/python: not a Python 3.10 or newer with its venv module\n")
    (checkout / ".venv" / "mine").mkdir(parents=True)
    status, _, err = run_bash(script, cwd="/", PIEBRIDGE_VENV="")
    assert status == 2 and "was not made by this script and has no working pip; delete it" in err
    assert (checkout / ".venv" / "mine").is_dir()


def test_setup_is_done_at_once_where_nothing_has_changed(checkout):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").symlink_to(sys.executable)
    checksum = subprocess.check_output("cksum <pyproject.toml", shell=True, cwd=str(checkout), universal_newlines=True).strip()
    (checkout / ".venv" / "piebridge-installed").write_text(f"{checksum} {checkout} engine,plot,pretrained,dev\n")
    for arguments in ([], ["dev"]):
        assert run_bash(checkout / "scripts" / "setup.sh", *arguments, cwd="/", PIEBRIDGE_VENV="") == (0, "", "")

"""The interpreter of the oldest boards: Python 3.6 with torch 1.10."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ASKED = "import sys, torch; print(sys.version_info[:2] == (3, 6) and torch.__version__.startswith('1.10.'))"
HOW = ("the files of current torch were NOT tried on Python 3.6 with torch 1.10: %s. Give its interpreter as "
       "PIEBRIDGE_LEGACY_PYTHON=/path/to/python")


@pytest.fixture(scope="session")
def legacy_python():
    """A function that runs (script, arguments) with Python 3.6. Without one tests are skipped; a named one that is another is an error."""
    given = os.environ.get("PIEBRIDGE_LEGACY_PYTHON")
    root = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    python = given or str(Path(root, "versions", "3.6.15", "bin", "python"))
    problem = problem_of(python)
    if problem and given:
        pytest.fail(HOW % f"PIEBRIDGE_LEGACY_PYTHON={given}: {problem}")
    if problem:
        pytest.skip(HOW % f"{python}: {problem}")
    return lambda *words: run(python, *words)


def problem_of(python):
    """Why an interpreter does not serve, or None."""
    if not os.access(python, os.X_OK):
        return "no such program"
    asked = subprocess.run([python, "-c", ASKED], stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, timeout=120)
    if asked.returncode:
        return (asked.stderr.strip().splitlines() or ["it ends with status %d" % asked.returncode])[-1]
    return None if asked.stdout.strip() == "True" else "it is not Python 3.6 with torch 1.10"


def run(python, script, *words):
    environment = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONDONTWRITEBYTECODE="1")
    done = subprocess.run([python, str(script), *map(str, words)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          universal_newlines=True, timeout=300)
    assert done.returncode == 0, done.stderr

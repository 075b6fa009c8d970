#!/usr/bin/env bash
# Sets up and runs every check: lint, the board's Python, unit and recipe tests, and tests/legacy where Python 3.6 with torch 1.10 is
# (PIEBRIDGE_LEGACY_PYTHON=/path/to/python, or pyenv's 3.6.15). CI runs exactly this.
# Needs: Python 3.10 or newer. Takes: about 10 minutes on two CPU cores, after the downloads.
# Usage: bash scripts/test.sh [pytest arguments]        for example: bash scripts/test.sh tests/unit -k table
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
bash "$here/setup.sh" dev
# shellcheck source=scripts/lib.sh
. "$here/lib.sh"

say "ruff"
"$python" -m ruff check piebridge tests doc
say "vermin: everything but forge and engine runs on Python 3.6"
"$(dirname "$python")/vermin" --quiet --target=3.6- --violations --no-tips --backport dataclasses --backport typing \
  piebridge/*.py piebridge/core piebridge/report
say "pytest"
"$python" -m pytest "$@"

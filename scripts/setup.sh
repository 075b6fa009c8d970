#!/usr/bin/env bash
# Makes the virtual environment .venv in the checkout and installs piebridge into it. The other scripts call this.
# Needs: Python 3.10 or newer with its venv module, network access the first time.
# Takes: a few minutes, most of it for downloading torch; a moment once it is done.
# Usage: bash scripts/setup.sh [dev]        dev adds what the tests need
#        PIEBRIDGE_PYTHON=/path/to/python3 bash scripts/setup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root="$PWD"
if [ -n "${PIEBRIDGE_VENV:-}" ]; then exit 0; fi # the user's own environment, as it is

stamp=".venv/piebridge-installed" # what the environment was completed with
unfinished=".cache/setup-unfinished" # stands while it is made for the first time
extras="engine,plot,pretrained"
if [ "${1:-}" = dev ] || grep -qs ',dev$' "$stamp"; then extras="$extras,dev"; fi
wanted="$(cksum <pyproject.toml) $root $extras"
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && [ -x .venv/bin/python ]; then exit 0; fi

# The newest Python first; the newest of all may be ahead of the packages, so it comes last.
find_python() {
  local candidate
  for candidate in ${PIEBRIDGE_PYTHON:+"$PIEBRIDGE_PYTHON"} python3.13 python3.12 python3.11 python3.10 python3; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then
      printf '%s\n' "$candidate"
      return
    elif [ "$candidate" = "${PIEBRIDGE_PYTHON:-}" ]; then
      break
    fi
  done
  if [ -n "${PIEBRIDGE_PYTHON:-}" ]; then
    printf 'PIEBRIDGE_PYTHON=%s: not a Python 3.10 or newer with its venv module\n' "$PIEBRIDGE_PYTHON" >&2
  else
    printf 'no Python 3.10 or newer with its venv module was found; install one (on Debian and Ubuntu: apt install python3-venv)\n' >&2
    printf 'or name it: PIEBRIDGE_PYTHON=/path/to/python3 bash scripts/setup.sh\n' >&2
  fi
  exit 2
}

if [ -e .venv ] && [ ! -e "$unfinished" ] && [ ! -e "$stamp" ] && ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  printf '%s/.venv was not made by this script and has no working pip; delete it, or name another: PIEBRIDGE_VENV=DIR\n' "$root" >&2
  exit 2
fi
# An interrupted environment, or one whose Python has gone, is made anew; --clear empties nothing but .venv.
if [ -e "$unfinished" ] || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  base="$(find_python)"
  mkdir -p .cache
  : >"$unfinished"
  printf 'Making .venv with %s\n' "$("$base" --version)"
  "$base" -m venv --clear .venv
fi

# One call for everything: pip then chooses a torch and a torchvision that were made for each other.
printf 'Installing piebridge[%s] into .venv (torch is large)\n' "$extras"
.venv/bin/python -m pip install --disable-pip-version-check "torch>=2.6" "torchvision>=0.21" --editable ".[$extras]" >&2
if ! .venv/bin/python -c 'import torch, torchvision; torchvision.ops.nms(torch.zeros(0, 4), torch.zeros(0), 0.5)'; then
  printf 'torch and torchvision in .venv do not fit together; delete .venv and run this again\n' >&2
  exit 1
fi
printf '%s\n' "$wanted" >"$stamp"
rm -f "$unfinished"

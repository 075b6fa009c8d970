# shellcheck shell=bash
# What the other scripts share; sourced, never run. Answers --help, sees to the environment, and leaves the shell in the project's root
# with these set:
#   root       the checkout              python    the virtual environment's interpreter
# and the functions below.

set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
case "${1:-}" in
  -h | --help) # the comment at the head of the script
    sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$(cd "$(dirname "$0")" && pwd)/$(basename "$0")"
    exit 0
    ;;
  -*) printf '%s: unknown option; --help says what there is\n' "$1" >&2; exit 2 ;;
esac
bash "$root/scripts/setup.sh"
cd "$root"
# Another environment may be named, for example one that has a GPU build of torch; nothing is then installed into it.
python="${PIEBRIDGE_VENV:-$root/.venv}/bin/python"
needs='import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None or importlib.util.find_spec("yaml") is None)'
if ! "$python" -c "$needs" 2>/dev/null; then
  printf 'PIEBRIDGE_VENV=%s: no environment with Python and torch; install piebridge into it, or unset the variable\n' "${PIEBRIDGE_VENV:-}" >&2
  exit 2
fi
failed=()

say() { printf '%s\n' "$*"; }

piebridge() { "$python" -m piebridge "$@"; }

# choose_device [GPU]: use the GPU with this number, or say in one line that there is none.
choose_device() {
  if [ -n "${1:-}" ]; then
    case "$1" in
      *[!0-9,]*) printf 'the GPU is given by its number, for example 0; not: %s\n' "$1" >&2; exit 2 ;;
    esac
    export CUDA_VISIBLE_DEVICES="$1"
  fi
  if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    say "No CUDA GPU here${1:+ with number $1}: running on the CPU."
  fi
}

# state_of FOLDER RUN [key=value ...]: prints "finished" or "to do"; a finished run of another configuration is an error.
state_of() {
  local code='import sys; from piebridge.console import exit_status; from piebridge.run_paths import state_of
sys.exit(exit_status(lambda: print(state_of(sys.argv[1], sys.argv[2], sys.argv[3:]))))'
  "$python" -c "$code" "$@"
}

# train FOLDER RUN [key=value ...]: one run into FOLDER, unless it is finished. A run that fails is remembered and does not
# stop the others; Ctrl-C does, and the same command goes on from there.
train() {
  local folder="$1" run="$2" status=0 state
  shift 2
  if ! state="$(state_of "$folder" "$run" "$@")"; then
    failed+=("$folder")
    return
  fi
  if [ "$state" = finished ]; then
    say "done already: $folder"
    return
  fi
  say "training: $folder"
  piebridge train "$run" "output=$folder" "$@" || status=$?
  if [ "$status" -eq 130 ] || [ "$status" -eq 143 ]; then
    printf 'stopped; the same command goes on from here\n' >&2
    exit "$status"
  elif [ "$status" -ne 0 ]; then
    failed+=("$folder")
  fi
}

# train_seeds RUN [key=value ...]: RUN once for each of $SEEDS (default "0"), where the tables look for them.
train_seeds() {
  local run="$1" seed folder
  shift
  for seed in ${SEEDS:-0}; do
    folder="res/train_log/$run"
    if [ "$seed" != 0 ]; then folder="$folder/seed_$seed"; fi
    train "$folder" "$run" "seed=$seed" "$@"
  done
}

# has_data NAME: whether the data set is here; where it is not, one line says how to get it.
has_data() {
  local code='import sys; from piebridge.core.data_catalogue import find_installed; sys.exit(find_installed(sys.argv[1]) is None)'
  "$python" -c "$code" "$1" || { say "$1 is not here; get it with: bash scripts/downloading.sh $1"; return 1; }
}

# compare METHODS: EfficientNet-Lite0 with each method on each of $DATASETS that is here.
compare() {
  local dataset method
  for dataset in ${DATASETS:-Clipart10 Openclipart}; do
    has_data "$dataset" || continue
    for method in $1; do
      train_seeds "efficientnet_lite0/$dataset/$method"
    done
  done
}

# run_dataset NAME NETWORKS [GPU]: the three published methods on one data set with each network, then the table, and expected results
# beside it.
run_dataset() {
  local name="$1" networks="$2" network method
  has_data "$name" || exit 2
  choose_device "${3:-}"
  for network in $networks; do
    for method in ours PET FTAll; do
      train_seeds "$network/$name/$method"
    done
  done
  for network in $networks; do
    print_table "res/train_log/$network/$name"
    compare_expected "$network" "$name"
  done
  finish
}

# print_table FOLDER: the table of all runs below FOLDER, after an empty line.
print_table() {
  say
  piebridge -q table "$1" || failed+=("the table of $1")
}

# compare_expected NETWORK NAME: what was run of NETWORK on NAME beside each set of expected results that has NAME.
compare_expected() {
  local folder="res/train_log/$1/$2" expected
  for expected in res/expected/*/; do
    if grep -qs ",$2," "$expected"*.csv; then
      say
      piebridge -q compare "$folder" "$expected" || failed+=("the comparison of $folder")
    fi
  done
}

# finish: name what failed, and end with 1 if anything did.
finish() {
  if [ "${#failed[@]}" -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
  fi
}

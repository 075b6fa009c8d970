#!/usr/bin/env bash
# The whole comparison: `ours` and every baseline, then the table and the plot.
# Takes: the sum of run_ours.sh and run_baselines.sh. Finished runs are skipped, so it can be stopped and started at will.
# Usage: bash scripts/run_e2e.sh [GPU]        SEEDS="0 1 2" DATASETS="Clipart10 Openclipart" may be set
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/lib.sh
. "$here/lib.sh"

choose_device "${1:-}"
compare "ours PET_cache PET_fast PET_fast_cache PET FTAll"
print_table res/train_log
say
plot="$(piebridge -q plot res/train_log output=res/plot.png)" || plot="none"
say "table: res/train_log/table.csv   plot: $plot"
finish

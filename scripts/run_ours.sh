#!/usr/bin/env bash
# `ours` with EfficientNet-Lite0 on the embedded set, and on Openclipart where that is here.
# Takes: seconds to a minute per run on two CPU cores.
# Usage: bash scripts/run_ours.sh [GPU]        SEEDS="0 1 2" DATASETS="Clipart10 Openclipart" may be set
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/lib.sh
. "$here/lib.sh"

choose_device "${1:-}"
compare "ours"
finish

#!/usr/bin/env bash
# The rows that `ours` is compared with, with EfficientNet-Lite0: full fine-tuning, parameter-efficient training as published, and
# the same on a fast backend and with a feature cache, so that each gain is credited where it belongs.
# Takes: 10 minutes per seed on the embedded set and an hour on Openclipart, on two CPU cores.
# Usage: bash scripts/run_baselines.sh [GPU]        SEEDS="0 1 2" DATASETS="Clipart10 Openclipart" may be set
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/lib.sh
. "$here/lib.sh"

choose_device "${1:-}"
compare "PET_cache PET_fast PET_fast_cache PET FTAll"
finish

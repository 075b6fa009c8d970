#!/usr/bin/env bash
# Openclipart with EfficientNet-Lite0: `ours`, `PET` and `FTAll`, then the table and the measured results of README.md beside it.
# Needs: the data set (piebridge data Openclipart says how). Takes: an hour per seed on two CPU cores.
# Usage: bash scripts/run_standalone_datasets/run_openclipart.sh [GPU]        SEEDS="0 1 2" and NETWORKS="efficientnet_lite0" may be set
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/lib.sh
. "$here/lib.sh"

run_dataset Openclipart "${NETWORKS:-efficientnet_lite0}" "${1:-}"

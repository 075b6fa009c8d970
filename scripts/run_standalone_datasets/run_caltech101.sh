#!/usr/bin/env bash
# Caltech101 with ResNet50 (or the networks named): `ours`, `PET` and `FTAll`, then the table and the published results beside it.
# Needs: the data set (piebridge data Caltech101 says how). Takes: hours; the paper reports 0.4 h, 0.6 h and 2.2 h on a Jetson TX2.
# Usage: bash scripts/run_standalone_datasets/run_caltech101.sh [GPU]        SEEDS="0 1 2" and NETWORKS="resnet mobilenet vit" may be set
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/lib.sh
. "$here/lib.sh"

run_dataset Caltech101 "${NETWORKS:-resnet}" "${1:-}"

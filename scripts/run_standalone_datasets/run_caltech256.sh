#!/usr/bin/env bash
# Caltech256 with ResNet50 (or the networks named): `ours`, `PET` and `FTAll`, then the table and the published results beside it.
# Needs: the data set (piebridge data Caltech256 says how). Takes: many hours; the paper reports 1.9 h, 3.0 h and 11.1 h on a Jetson TX2.
# Usage: bash scripts/run_standalone_datasets/run_caltech256.sh [GPU]        SEEDS="0 1 2" and NETWORKS="resnet mobilenet vit" may be set
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/lib.sh
. "$here/lib.sh"

run_dataset Caltech256 "${NETWORKS:-resnet}" "${1:-}"

#!/usr/bin/env bash
# DogsVsCats with ResNet50 (or the networks named): `ours`, `PET` and `FTAll`, then the table and the published results beside it.
# Needs: the data set (piebridge data DogsVsCats says how). Takes: hours; the paper reports 0.2 h, 0.4 h and 1.3 h on a Jetson TX2.
# Usage: bash scripts/run_standalone_datasets/run_dogsvscats.sh [GPU]        SEEDS="0 1 2" and NETWORKS="resnet mobilenet vit" may be set
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/lib.sh
. "$here/lib.sh"

run_dataset DogsVsCats "${NETWORKS:-resnet}" "${1:-}"

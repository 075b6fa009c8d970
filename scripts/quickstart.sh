#!/usr/bin/env bash
# From a fresh clone to a comparison: sets up, fine-tunes an ImageNet-pretrained EfficientNet-Lite0 on the embedded clip art with
# `ours`, `PET` and `FTAll`, prints the table, and says where everything is.
# Needs: Python 3.10 or newer; no GPU, no root, no account.
# Takes: under 10 minutes on two CPU cores, after the downloads. Interrupted, it goes on where it stopped.
# Usage: bash scripts/quickstart.sh        EPOCHS=2 bash scripts/quickstart.sh for a quick look
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/lib.sh
. "$here/lib.sh"

epochs="${EPOCHS:-8}"
results="res/quickstart"
if [ "$epochs" != 8 ]; then results="res/quickstart_${epochs}_epochs"; fi

say "1/3  Training three methods on datasets/Clipart10, epochs: $epochs"
for method in ours PET FTAll; do
  train "$results/$method" "efficientnet_lite0/Clipart10/$method" "epochs=$epochs"
done

say
say "2/3  Comparing them"
print_table "$results"
plot="$(piebridge -q plot "$root/$results")" || plot="none"

say
say "3/3  What you have now"
say "  run folders    $root/$results/{ours,PET,FTAll}"
say "  plot           $plot"
say "  tuned network  $root/$results/ours/tuned.safetensors"
say
say "Your own images, one folder per class below FOLDER:"
say "  $(printf '%q' "$python") -m piebridge train efficientnet_lite0/Clipart10/ours data=FOLDER output=res/mine"
finish

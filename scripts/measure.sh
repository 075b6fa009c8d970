#!/usr/bin/env bash
# The measured results of README.md: every method on Clipart10 and Openclipart with three seeds, then the tables.
# Needs: the Openclipart set (piebridge data Openclipart), and a machine that does nothing else. Takes: about 100 minutes on two
# CPU cores, nearly all of it FTAll's and PET's. Finished runs are skipped, so it goes on after an interruption.
# Usage: bash scripts/measure.sh [OUTPUT_FOLDER]        SEEDS="0 1 2" DATASETS="Clipart10 Openclipart" METHODS="ours PET" may be set;
#        DATASETS="Openclipart_views" METHODS="ours PET_fast PET_fast_cache" makes the second table of doc/results.md
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/lib.sh
. "$here/lib.sh"

output="${1:-res/measured_here}"

# Each run starts with an empty device profile: it pays for its own probe, as the first run on a new device does.
measure() {
  local data="$1" seed="$2" method="$3" profile
  profile="$(mktemp -d)"
  PIEBRIDGE_CACHE="$profile" train "$output/$data/$method/seed_$seed" "efficientnet_lite0/$data/$method" "seed=$seed"
  rm -r "$profile"
}

# Methods take turns within a seed, so that a machine that slows down slows all of them. FTAll takes four fifths of the time and
# comes last: what it is compared with is there early.
for data in ${DATASETS:-Clipart10 Openclipart}; do
  for seed in ${SEEDS:-0 1 2}; do
    for method in ${METHODS:-ours PET PET_fast PET_cache PET_fast_cache}; do measure "$data" "$seed" "$method"; done
  done
done
if [ -z "${METHODS:-}" ]; then
  for data in ${DATASETS:-Clipart10 Openclipart}; do
    for seed in ${SEEDS:-0 1 2}; do measure "$data" "$seed" FTAll; done
  done
fi

piebridge table "$output" --markdown
finish

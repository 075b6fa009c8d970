#!/usr/bin/env bash
# Fetches or builds every data set. What is there already is kept; nothing is ever deleted.
# Needs: network access, and about 10 GB of disk for all of them.
# Usage: bash scripts/downloading.sh [NAME ...]        for example: bash scripts/downloading.sh Openclipart
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# shellcheck source=scripts/lib.sh
. "$here/lib.sh"

if [ "$#" -eq 0 ]; then set -- Openclipart Caltech101 Caltech256 DogsVsCats DTD; fi
for name in "$@"; do
  piebridge data "$name" || failed+=("$name")
done
finish

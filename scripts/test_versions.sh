#!/usr/bin/env bash
# Short tests with the oldest and the newest pair of torch and Megatron-core, within ten minutes.
# Versions stay in $VERSIONS, build/versions if unset. Without a network nothing is tried, and it says so.
set -euo pipefail
cd "$(dirname "$0")/.."

versions=${VERSIONS:-build/versions}
code=0
.venv/bin/python scripts/try_torch.py --short --keep "$versions" || code=$?
if ((code == 2)); then
    echo "skipped: pip could not install a version into $versions; its reason is above"
    exit 0
fi
exit $code

#!/usr/bin/env bash
# All tests: first those that start no process, on both cores; then the others, one after the other.
# Arguments are pytest's, and then it is run once: scripts/test.sh tests/plan -k deadlock
set -euo pipefail
cd "$(dirname "$0")/.."

if (($#)); then
    exec .venv/bin/python -m pytest "$@"
fi
failed=0
.venv/bin/python -m pytest -q -n 2 --dist loadfile -m "not (gloo or processes)" || failed=1
.venv/bin/python -m pytest -q -m "gloo or processes" || failed=1
exit $failed

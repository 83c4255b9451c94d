#!/usr/bin/env bash
# All tests, on both cores and in the order of tests/conftest.py; then, one after the other, those
# that measure how long something takes.
# Arguments are pytest's, and then it is run once: scripts/test.sh tests/plan -k deadlock
set -euo pipefail
cd "$(dirname "$0")/.."

# Or each rank compiles what it imports, where PYTHONDONTWRITEBYTECODE is set: a fourth of its work.
.venv/bin/python -m compileall -q megatron fold3d_patches scripts tests pretrain_*.py
if (($#)); then
    exec .venv/bin/python -m pytest "$@"
fi
failed=0
.venv/bin/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "not alone" || failed=1
mapfile -t measuring < <(grep -rl --include="test_*.py" "mark\.alone" tests)
.venv/bin/python -m pytest -q -m alone "${measuring[@]}" || failed=1
exit $failed

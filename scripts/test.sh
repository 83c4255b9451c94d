#!/usr/bin/env bash
# All tests: those that start no process and those that start ranks alone, on both cores; then the
# others, one after the other, as they measure time or share the machine's ports and networks.
# Arguments are pytest's, and then it is run once: scripts/test.sh tests/plan -k deadlock
set -euo pipefail
cd "$(dirname "$0")/.."

# Or each rank compiles what it imports, where PYTHONDONTWRITEBYTECODE is set: a fourth of its work.
.venv/bin/python -m compileall -q megatron fold3d_patches scripts tests pretrain_*.py
if (($#)); then
    exec .venv/bin/python -m pytest "$@"
fi
failed=0
.venv/bin/python -m pytest -q -n 2 --dist loadfile -m "not (gloo or processes)" || failed=1
.venv/bin/python -m pytest -q -n 2 --dist loadfile -m "gloo and not processes" || failed=1
.venv/bin/python -m pytest -q -m processes || failed=1
exit $failed

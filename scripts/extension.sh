#!/usr/bin/env bash
# Build the C++ scheduler of --preemptive-comm into the checkout, unless it is there and current.
set -euo pipefail
cd "$(dirname "$0")/.."

built=(megatron/fold3d/runtime/preemption/_scheduler.*.so)
if [[ -f ${built[0]} && -z $(find csrc setup.py .venv/installed -newer "${built[0]}" -print -quit) ]]; then
    exit 0
fi
if ! command -v "${CXX:-c++}" >/dev/null; then
    echo "No C++ compiler: --preemptive-comm is refused. Install g++, then: make extension"
    exit 0
fi
echo "Building the C++ scheduler: half a minute."
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! .venv/bin/python -W ignore setup.py -q build_ext --inplace >"$log" 2>&1; then
    cat "$log" >&2
    echo "error: the C++ scheduler does not build; see above" >&2
    exit 1
fi
touch megatron/fold3d/runtime/preemption/_scheduler.*.so

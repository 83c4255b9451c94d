#!/usr/bin/env bash
# Build the C++ scheduler of --preemptive-comm and the code of --delta-param-gather into the checkout,
# unless they are there and current.
set -euo pipefail
cd "$(dirname "$0")/.."

built=(megatron/fold3d/runtime/preemption/_scheduler.*.so)
coder=megatron/fold3d/runtime/grad_sync/delta_code.cpu.so
if [[ -f ${built[0]} && -f $coder && -z $(find csrc setup.py .venv/installed -newer "${built[0]}" -print -quit) ]]; then
    exit 0
fi
if ! command -v "${CXX:-c++}" >/dev/null; then
    echo "No C++ compiler: --preemptive-comm and --delta-param-gather are refused. Install g++, then: make extension"
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
"${CXX:-c++}" -O3 -std=c++20 -shared -fPIC csrc/delta_code.cpp -o "$coder"
touch megatron/fold3d/runtime/preemption/_scheduler.*.so

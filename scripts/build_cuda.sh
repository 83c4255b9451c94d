#!/usr/bin/env bash
# Compile the GPU side of --offload-activations and of --delta-param-gather. Takes the GPU architecture for nvcc's -arch:
# `native` where the GPU is at hand, every major one otherwise.
set -euo pipefail
cd "$(dirname "$0")/.."

architecture=${1:-all-major}
offload=${2:-megatron/fold3d/runtime/offload/offload.cuda.so}
delta_code=${3:-megatron/fold3d/runtime/grad_sync/delta_code.cuda.so}
nvcc=${CUDA_HOME:+$CUDA_HOME/bin/}nvcc

if ! command -v "$nvcc" >/dev/null; then
    echo "no nvcc: install the CUDA toolkit 12.0 or later, or set CUDA_HOME to where it is" >&2
    exit 1
fi
build() {
    "$nvcc" -O2 -std=c++20 -shared -Xcompiler -fPIC,-Wall,-Wextra,-Werror "-arch=$architecture" \
        -Xlinker --no-undefined "${@:2}" -o "$1"
    echo "built $1"
}
build "$offload" csrc/batched_copy.cu csrc/batched_copy.cpp csrc/pinned_pool.cpp csrc/offload.cpp
build "$delta_code" csrc/delta_code.cu

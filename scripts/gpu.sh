#!/usr/bin/env bash
# Everything that waits for a GPU: build, test, measure. One GPU is enough; about ten minutes.
#
#   scripts/gpu.sh [FOLDER [PYTHON [STEP...]]]
#
# Each step's output goes to a file of FOLDER (out/gpu) as well, and one that fails stops no other.
# Names of steps choose among them.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

folder=${1:-out/gpu}
python=${2:-.venv/bin/python}
chosen=" ${*:3} "
# Layers of GPT-3 18B on 4 pipeline ranks in 2 segments, as in the paper.
gpt3=(rank --hidden-size 6144 --heads 48 --tensor-parallel 8 --layers 5 --micro-batch-size 4)
known=" "
failed=()
mkdir -p "$folder"

step() { # a name, then a command
    local name=$1
    known+="$name "
    shift
    if [[ $chosen != "  " && $chosen != *" $name "* ]]; then
        return
    fi
    printf '== %s: %s\n' "$name" "$*"
    if ! "$@" 2>&1 | tee "$folder/$name.log"; then
        failed+=("$name")
    fi
}

step machine nvidia-smi
step build scripts/build_cuda.sh native
step extension "$python" -W ignore setup.py -q build_ext --inplace
step tests "$python" -m pytest -m gpu tests/gpu tests/runtime/transfers/test_host_link.py
step copies "$python" -m scripts.bench.offload copies
step rank-1024 "$python" -m scripts.bench.offload "${gpt3[@]}" --seq-length 1024
step rank-2048 "$python" -m scripts.bench.offload "${gpt3[@]}" --seq-length 2048
step rank-2048-sp "$python" -m scripts.bench.offload "${gpt3[@]}" --seq-length 2048 \
    --sequence-parallel

for name in "${@:3}"; do
    if [[ $known != *" $name "* ]]; then
        echo "gpu.sh: error: no step is called $name; there are$known" >&2
        exit 2
    fi
done
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}; see $folder" >&2
    exit 1
fi

#!/usr/bin/env bash
# What finds more the longer it runs, one line each; {minutes} is what STRESS_MINUTES says, {quarter}
# a quarter of it in seconds.
# The logs are in out/stress.
set -euo pipefail
cd "$(dirname "$0")/.."

out=out/stress/$(date +%Y%m%d-%H%M%S)
seed=${STRESS_SEED:-$RANDOM}
checks=(
    "fuzz --minutes {minutes} --seed $seed --log $out/fuzz.jsonl"
    "faults --minutes {minutes} --seed $seed --log $out/faults.jsonl"
    "growth"
    "gpu_path --seconds {seconds}"
    "one_queue --seconds {quarter} --seed $seed"
    "searches"
    "auto_cells"
    "auto_cells --every"
    "predictions --jobs 200 --seed $seed"
    "built_models --jobs 500 --seed $seed"
)
minutes=${STRESS_MINUTES:-60}
mkdir -p "$out"

failed=()
for check in "${checks[@]}"; do
    check=${check//\{minutes\}/$minutes}
    check=${check//\{seconds\}/$((minutes * 60))}
    check=${check//\{quarter\}/$((minutes * 15))}
    echo "== $check"
    # shellcheck disable=SC2086  # the words of a line
    OMP_NUM_THREADS=1 .venv/bin/python -W ignore -m tests.stress.$check || failed+=("${check%% *}")
done
echo "== tests marked stress"
.venv/bin/python -m pytest -q --stress -m stress || failed+=(marked)
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}; seed $seed, logs in $out" >&2
    exit 1
fi

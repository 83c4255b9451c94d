#!/usr/bin/env bash
# What the .sbatch files share: one training run on all tasks of an allocation, a rank per task.
#
#     run.sh SCRIPT SEGMENTS FLAGS... -- USER...     pretrain_gpt.py say, and model chunks per rank
#
# Each task of the job array is a system of scripts/paper/systems.py: by default stock Megatron as it
# hides communication best, and ours as we recommend it. SYSTEMS="megatron dspeed3d fold3d" names
# others, with sbatch --array=0-2, and SEGMENTS another number of chunks. They are jobs of their own:
# each has its log, its checkpoints and its place in the queue, and can be preempted alone.
set -euo pipefail

[[ -f $1 ]] || {
    echo "run.sh: error: no $1 in $PWD; run sbatch in the checkout" >&2
    exit 2
}
PATH=$PWD/.venv/bin:$PATH # of `make venv`; where there is none, the python that sbatch was run with

read -ra systems <<<"${SYSTEMS:-megatron-best auto}"
name=${systems[${SLURM_ARRAY_TASK_ID:-1}]:-}
[[ -n $name ]] || {
    echo "run.sh: error: no system for task ${SLURM_ARRAY_TASK_ID:-1}: name one more in SYSTEMS" >&2
    exit 2
}
# The job's flags stand before the system's, which may change its layout; the user's come last.
script=$1 layout=(--ranks "$SLURM_NTASKS" --segments "${SEGMENTS:-$2}") job=()
shift 2
while [[ ${1---} != -- ]]; do
    job+=("$1")
    shift
done
flags=("${@:2}")
# It says why, if it cannot run here.
chosen=$(python -m scripts.paper.systems "$name" "${layout[@]}" -- "${job[@]}" "${flags[@]}")
read -ra system <<<"${chosen//$'\n'/ }"
if [[ " ${system[*]} ${flags[*]-} " == *" --offload-activations "* ]]; then
    # What is offloaded is whole on each tensor-parallel rank.
    for i in "${!job[@]}"; do
        [[ ${job[i]} != --distribute-saved-activations ]] || unset "job[i]"
    done
fi

# A job keeps its id when it is requeued, so it finds here what it saved. The first time there is
# nothing to load, and Megatron says so. On a cluster, out/ is on a file system that nodes share.
checkpoints=out/slurm/${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}/$name

# All tasks get the user's words. In a folder that they name, each of several systems writes to one of
# its own.
((${#systems[@]} > 1)) && nested=/$name || nested=
for i in "${!flags[@]}"; do
    case ${flags[i]} in
        --save | --tensorboard-dir | --trace | --wandb-save-dir) named=$((i + 1)) ;;
        --save=* | --tensorboard-dir=* | --trace=* | --wandb-save-dir=*) named=$i ;;
        *) continue ;;
    esac
    [[ -n ${flags[named]-} ]] || continue # Megatron says what is missing
    flags[named]+=$nested
    [[ ${flags[i]} != --save* ]] || checkpoints=${flags[named]#--save=}
done
mkdir -p "$checkpoints"

# SIGTERM makes Megatron save after the iteration it is in, and exit. It comes to the ranks
#  - from SLURM, which preempts the job or was told `scontrol requeue`: SLURM starts it again. The
#    ranks have KillWait seconds (slurm.conf, 30 unless set), or the partition's GraceTime;
#  - from us, when SLURM sends this script SIGUSR1 (#SBATCH --signal) before the time limit, or
#    before preemption (PreemptParameters=send_user_signal): then we requeue.
trap : TERM # SLURM sends it to this script too, which waits for its ranks
trap 'requeue=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
requeue=

# Flags that are given twice count as given last: the user's.
scripts/slurm/ranks.sh "$script" \
    --save "$checkpoints" --load "$checkpoints" --save-interval 500 --exit-signal-handler \
    "${job[@]}" "${system[@]}" ${flags[@]+"${flags[@]}"} &
ranks=$!

while true; do
    status=0
    wait "$ranks" || status=$?
    kill -0 "$ranks" 2>/dev/null || break # else a signal has ended the wait, but not the ranks
done
[[ -z $requeue ]] || exec scontrol requeue "$SLURM_JOB_ID"
exit "$status"

#!/usr/bin/env bash
# Start a rank of a training on each task of an allocation, as torchrun would:
#
#     ranks.sh pretrain_gpt.py FLAGS...
#
# SIGTERM reaches ranks with nobody in between, and srun ends all of them when one fails. The first
# node, which runs this script, has rank 0.
set -euo pipefail

export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
# A free port below those that outgoing connections take: one of these may be gone when rank 0 has imported
# torch. A job's id would not tell apart two clusters on one machine.
MASTER_PORT=$(python -c '
import random, socket
for port in random.sample(range(10000, 32768), 100):
    try:
        socket.create_server(("", port)).close()
    except OSError:
        continue
    print(port)
    break')
export MASTER_PORT
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun no longer takes it from sbatch
# Hardware queues, unless you give a number: by the README's rule, which has one with tensor or
# context parallelism and else 32. Preemption needs one for each stream, and FSDP2 refuses one.
queues=32
[[ ! " $*" =~ " --"(tensor-model|context)-parallel-size[=\ ]([2-9]|1[0-9]) ]] || queues=1
case " $* " in
    *" --preemptive-comm "*) queues=32 ;;
    *" --use-torch-fsdp2 "*) queues=8 ;; # CUDA's default
esac
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-$queues}
# shellcheck disable=SC2016  # the variables are those of each task
as_rank='export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID MASTER_ADDR=$SLURM_LAUNCH_NODE_IPADDR
exec "$@"'

# Every task sees all GPUs of its node and takes the one of its LOCAL_RANK: --gpus-per-task would
# hide the others, and with them NVLink.
exec srun --kill-on-bad-exit=1 --mpi=none bash -c "$as_rank" rank python "$@"

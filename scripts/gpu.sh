#!/usr/bin/env bash
# Everything that waits for a GPU: build, test, train, measure. One GPU is enough; about twenty
# minutes. Two also train pipelines and replicas, four tensor parallelism and the distributed
# optimizer, eight all of it at once.
#
#   scripts/gpu.sh [--dry-run] [FOLDER [PYTHON [STEP...]]]
#
# Each step's output goes to a file of FOLDER (out/gpu) as well, and one that fails stops no other.
# It fails if it takes longer than STEP_SECONDS (900), or if losses are not those of stock. Names of
# steps choose among them. At the end it prints one table, and what the steps say about each claim of
# docs/gpu.md. All of it is in FOLDER/report.txt: attach that file to a bug report. --dry-run prints the commands alone; GPUS and IMPLEMENTATIONS
# then say for how many GPUs and which layers.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

dry=
if [[ ${1-} == --dry-run ]]; then
    dry=yes
    shift
fi
folder=${1:-out/gpu}
python=${2:-.venv/bin/python}
chosen=" ${*:3} "
gpus=${GPUS:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
# Layers of GPT-3 18B on 4 pipeline ranks in 2 segments, as in the paper.
gpt3=(rank --hidden-size 6144 --heads 48 --tensor-parallel 8 --layers 5 --micro-batch-size 4)
naming=yes # the first time through, steps only say their names
known=" "
failed=()
ran=" "
rows=()

step() { # a name, then a command
    local name=$1 status=0 begin=$SECONDS limit=(timeout -k 30 "${STEP_SECONDS:-900}")
    shift
    if [[ $naming ]]; then
        known+="$name "
        return
    fi
    if [[ $chosen != "  " && $chosen != *" $name "* ]]; then
        return
    fi
    printf '== %s: %s\n' "$name" "$*"
    [[ $dry ]] && return
    [[ $1 == same_losses || $1 == as_fast ]] && limit=() # functions
    ${limit[@]+"${limit[@]}"} "$@" 2>&1 | tee "$folder/$name.log" || status=1
    ((status)) && failed+=("$name")
    ran+="$name "
    rows+=("$(printf '%-24s %-6s %5d s  %s' "$name" "$( ((status)) && echo FAILED || echo ok)" \
        $((SECONDS - begin)) "$(summary "$folder/$name.log")")")
}

summary() { # of a log: the last iteration's time and loss, or else its last line
    local found
    found=$(grep -o 'elapsed time per iteration (ms): [0-9.]*\|lm loss: [^|]*' "$1" | tail -2 | paste -sd' ')
    echo "${found:-$(grep -v '^ *$' "$1" | tail -1 | cut -c1-90)}"
}

losses() { # of a log, by iteration, in every digit that Megatron writes
    grep -o 'iteration *[0-9]*/\|lm loss: [0-9.E+-]*' "$1"
}

same_losses() { # two runs
    [[ -f $folder/$1.log && -f $folder/$2.log ]] || { # one was not chosen
        echo "not compared: there is no $1.log or no $2.log"
        return
    }
    local found
    found=$(losses "$folder/$1.log" | grep -c loss) || { # grep found none
        echo "there is no loss in $1.log"
        return 1
    }
    diff <(losses "$folder/$1.log") <(losses "$folder/$2.log") &&
        echo "equal in every digit: $found losses"
}

as_fast() { # two runs: the first may take 5% longer, in the median of the last ten iterations
    local run times=()
    for run in "$1" "$2"; do
        times+=("$(grep -o 'per iteration (ms): [0-9.]*' "$folder/$run.log" | grep -o '[0-9.]*$' |
            tail -10 | sort -n | sed -n 5p)")
        [[ ${times[-1]} ]] || {
            echo "there are no ten iterations in $run.log"
            return 1
        }
    done
    echo "$1 ${times[0]} ms, $2 ${times[1]} ms"
    awk "BEGIN { exit !(${times[0]} <= 1.05 * ${times[1]}) }"
}

claims() { # of docs/gpu.md: what the steps that it names say about each
    local claim steps name word verdict
    while IFS='|' read -r _ claim _ steps _; do
        verdict="not run"
        for word in $(tr -d '`,' <<<"$steps"); do
            for name in $ran; do
                # shellcheck disable=SC2053  # the page has patterns
                [[ $name == $word || $name == $word-losses || $name == $word-time ]] || continue
                [[ $verdict == CONTRADICTED ]] || verdict=confirmed
                [[ $verdict == CONTRADICTED || $name != copies && $name != rank-* ]] || verdict=measured
                [[ " ${failed[*]-} " != *" $name "* ]] || verdict=CONTRADICTED
            done
        done
        printf '%-13s%s\n' "$verdict" "$claim"
    done < <(sed -n '/^| claim /,/^$/p' docs/gpu.md | tail -n +3 | grep '`[^|]*|$')
}

# A small GPT: 8 layers, hidden size 1024. Every run has the same data, so losses can be compared.
# QUEUES is for CUDA: 32 if it is not set.
train() { # a name, the number of ranks, then flags
    local name=$1 ranks=$2 trace=(--trace "$folder/trace/$1")
    [[ $name != *-untraced ]] || trace=()
    step "$name" env CUDA_DEVICE_MAX_CONNECTIONS="${QUEUES:-32}" "$python" -m torch.distributed.run --nproc-per-node "$ranks" pretrain_gpt.py \
        --num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 \
        --max-position-embeddings 1024 --bf16 --micro-batch-size 1 --global-batch-size 16 \
        --attention-dropout 0 --hidden-dropout 0 \
        --overlap-grad-reduce --train-iters 20 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer \
        --vocab-size 50257 --eval-iters 0 --eval-interval 1000 --log-interval 1 \
        ${trace[@]+"${trace[@]}"} "${@:3}"
    if [[ "$*" == *"--schedule stock"* ]]; then
        reference=$name
    else
        step "$name-losses" same_losses "$name" "$reference"
    fi
}

all_steps() {
    step machine nvidia-smi
    step doctor "$python" -c 'import sys; from megatron.fold3d.cli import main; sys.exit(main(["doctor"]))'
    step build scripts/build_cuda.sh native
    step extension "$python" -W ignore setup.py -q build_ext --inplace
    step tests "$python" -m pytest -m gpu tests/gpu/test_{communicator,delta_code,offload}.py \
        tests/runtime/transfers/test_host_link.py
    if ((gpus >= 8)) || [[ $naming$dry ]] || pgrep -f nvidia-cuda-mps-control >/dev/null; then
        STEP_SECONDS=5400 step nccl "$python" -m pytest -m gpu tests/gpu/test_over_nccl.py
    fi
    for connections in 1 8 32; do
        step "queue-$connections" env CUDA_DEVICE_MAX_CONNECTIONS=$connections "$python" -m scripts.bench.queues
    done
    step delta-code "$python" -m scripts.bench.delta_code --device cuda --megabytes 512
    step timed-event-1 env CUDA_DEVICE_MAX_CONNECTIONS=1 "$python" -m scripts.bench.queues --timed-event

    implementations=${IMPLEMENTATIONS:-local}
    if [[ -z ${IMPLEMENTATIONS-} ]] && "$python" -c 'import transformer_engine.pytorch' 2>/dev/null; then
        implementations="local transformer_engine"
    fi
    full=(--recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
    offload=("${full[@]}" --offload-activations on)
    for layers in $implementations; do
        as=(--transformer-impl "$layers")
        [[ $layers == local ]] && as+=(--no-persist-layer-norm --no-masked-softmax-fusion
            --no-gradient-accumulation-fusion)
        train "$layers-stock" 1 --schedule stock "${as[@]}"
        train "$layers-aiao" 1 --schedule aiao "${as[@]}"
        train "$layers-aiao-weights" 1 --schedule aiao:wgrad=behind "${as[@]}"
        train "$layers-aiao-offload" 1 --schedule aiao "${as[@]}" "${offload[@]}"
        if ((gpus >= 2)); then
            pp=(--pipeline-model-parallel-size 2 --segments 2)
            train "$layers-pp-stock" 2 --schedule stock "${as[@]}" "${pp[@]}"
            train "$layers-pp-aiao" 2 --schedule aiao "${as[@]}" "${pp[@]}"
            train "$layers-pp-aiao-offload" 2 --schedule aiao "${as[@]}" "${pp[@]}" "${offload[@]}" \
                --lazy-inter-segment
            train "$layers-dp-stock" 2 --schedule stock "${as[@]}" --clip-grad 0
            train "$layers-dp-share" 2 --schedule 1f1b:step=next:share=0.5 "${as[@]}" \
                --clip-grad 0
            QUEUES=1 train "$layers-pp-one-queue" 2 --schedule stock "${as[@]}" "${pp[@]}"
            QUEUES=1 train "$layers-pp-traced" 2 --schedule aiao "${as[@]}" "${pp[@]}"
            QUEUES=1 train "$layers-pp-untraced" 2 --schedule aiao "${as[@]}" "${pp[@]}"
            step "$layers-pp-traced-time" as_fast "$layers-pp-traced" "$layers-pp-untraced"
        fi
        if ((gpus >= 4)); then
            train "$layers-pp-dp-stock" 4 --schedule stock "${as[@]}" "${pp[@]}"
            train "$layers-pp-dp-aiao" 4 --schedule aiao "${as[@]}" "${pp[@]}"
            train "$layers-pp-dp-preempt" 4 --schedule aiao "${as[@]}" "${pp[@]}" --preemptive-comm

            zero=("${pp[@]}" --use-distributed-optimizer --overlap-param-gather
                --untie-embeddings-and-output-weights)
            train "$layers-zero-stock" 4 --schedule stock "${as[@]}" "${zero[@]}"
            train "$layers-zero-aiao" 4 --schedule aiao "${as[@]}" "${zero[@]}"
            train "$layers-zero-auto" 4 --schedule auto "${as[@]}" "${zero[@]}"
            train "$layers-zero-shards" 4 --schedule aiao "${as[@]}" "${zero[@]}" \
                --shard-segments gradients
            train "$layers-zero-replicated" 4 --schedule aiao:optimizer=replicated@1 \
                "${as[@]}" "${zero[@]}"

            tp=("${pp[@]}" --tensor-model-parallel-size 2)
            # Megatron's own norms lack sequence parallelism without apex.
            [[ $layers == local ]] || tp+=(--sequence-parallel)
            QUEUES=1 train "$layers-tp-stock" 4 --schedule stock "${as[@]}" "${tp[@]}"
            QUEUES=1 train "$layers-tp-aiao" 4 --schedule aiao "${as[@]}" "${tp[@]}"
            train "$layers-tp-queues" 4 --schedule aiao "${as[@]}" "${tp[@]}"
            [[ $layers != local ]] ||
                QUEUES=1 train "$layers-tp-pairs" 4 --schedule aiao:pairs=on "${as[@]}" "${tp[@]}"
        fi
        if ((gpus >= 8)); then
            QUEUES=1 train "$layers-all-stock" 8 --schedule stock "${as[@]}" "${tp[@]}" --clip-grad 0
            QUEUES=1 train "$layers-all-share" 8 --schedule aiao:step=next:share=0.5 "${as[@]}" \
                "${tp[@]}" --clip-grad 0
            train "$layers-all-queues" 8 --schedule aiao:step=next:share=0.5 "${as[@]}" \
                "${tp[@]}" --clip-grad 0 --preemptive-comm "${offload[@]}"
        fi
    done

    step copies "$python" -m scripts.bench.offload copies
    step rank-1024 "$python" -m scripts.bench.offload "${gpt3[@]}" --seq-length 1024
    step rank-2048 "$python" -m scripts.bench.offload "${gpt3[@]}" --seq-length 2048
    step rank-2048-sp "$python" -m scripts.bench.offload "${gpt3[@]}" --seq-length 2048 \
        --sequence-parallel
}

all_steps
naming=
for name in "${@:3}"; do
    if [[ $known != *" $name "* ]]; then
        echo "gpu.sh: error: no step is called $name; there are$known" >&2
        exit 2
    fi
done
[[ $dry ]] || mkdir -p "$folder"
all_steps
[[ $dry ]] && exit
table=$(printf '%s\n' "${rows[@]}" && printf '\nClaims of docs/gpu.md:\n' && claims)
printf '\n%s\n' "$table"
{
    git log -1 --format='fold3d %H %cI' 2>/dev/null
    printf '%s\n' "$table"
    for log in "$folder"/*.log; do
        printf '\n===== %s\n' "$log"
        tail -n 200 "$log"
    done
} >"$folder/report.txt"
echo "all of it: $folder/report.txt; traces: $folder/trace"
if ((${#failed[@]})); then
    echo "failed: ${failed[*]}; see $folder" >&2
    exit 1
fi

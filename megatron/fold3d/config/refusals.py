"""The table of impossible combinations, which refuses a choice and bounds what `auto` tries.

A row names a setting that cannot be combined with a value (see `config.settings`), the reason, and
the way out. ``stock`` is Megatron's own schedule, and works with every option of Megatron.
scripts/print_refusals.py prints the table into docs/compatibility.md.

    "{} with step=next": {                            a value, and how messages name it
        "stock's schedule": "rule; fix",              stock has no such value
        "--qk-clip, --log-params-norm": "rule; fix",  each of these is refused beside the value
        "without --a and --b": "rule; add {}",        the value needs all of these
    },
"""

from argparse import Namespace
from collections.abc import Iterator, Mapping

from megatron.fold3d.config.bucket_flags import has_one_queue
from megatron.fold3d.config.fold3d_config import Switch
from megatron.fold3d.config.job_sizes import num_replicas
from megatron.fold3d.config.schedule_flags import parts_of, word_of
from megatron.fold3d.config.settings import asked
from megatron.fold3d.config.spelling import flag_of
from megatron.fold3d.plan.schedule_word import AUTO, STOCK, VALUES

STOCKS, WITHOUT = "stock's schedule", "without "
_FIXED_ORDER = "--deterministic-mode"
_DELTA_ON, _SUMS_ON = "--delta-param-gather on", "--coded-grad-reduce on"
# Values that stock's schedule has.
_OF_STOCK = ("--trace of stock's schedule", "share=", "optimizer=sharded", _DELTA_ON, _SUMS_ON)


def refusals(args: Namespace, but: str = "") -> Iterator[str]:
    """Yield one message (found, rule, fix) per combination in ``args`` that cannot work.

    Args:
        args: Megatron's namespace, with numbers of segments in place of ``all``.
        but: a value whose rows are left out.
    """
    is_stock = word_of(args).order == STOCK
    for form, rows in TABLE.items():
        value = value_of(form)
        found = "" if value == but else asked(args, value)
        if found and is_stock and value not in _OF_STOCK:
            yield from [f"{found} with --schedule stock: {rows[STOCKS]}"] if STOCKS in rows else ()
        elif found:
            yield from refused(args, form.replace(value, found), rows)


def refused(args: Namespace, form: str, rows: Mapping[str, str]) -> Iterator[str]:
    """Yield the messages of a value's rows; ``form`` is a key such as ``{} with step=next``."""
    for settings, why in rows.items():
        if settings.startswith(WITHOUT):
            needed = settings.removeprefix(WITHOUT).split(" and ")
            if missing := [setting for setting in needed if not asked(args, setting)]:
                fix = why.replace("{}", " ".join(missing))
                yield f"{value_of(form)} without {' and '.join(missing)}: {fix}"
            continue
        for setting in settings.split(", "):
            if other := asked(args, setting):
                yield f"{form.replace('{}', other)}: {why}"


def value_of(form: str) -> str:
    """Return the value in a key of the table: ``step=next`` in ``{} with step=next``."""
    return form.removeprefix("{} with ").removesuffix(" with {}")


def unknown_segments(args: Namespace, num_segments: int) -> Iterator[str]:
    """Yield one message (found, rule, fix) per part for segments that a rank does not have.

    Args:
        args: Megatron's namespace, with numbers of segments in place of ``all``.
        num_segments: segments per rank; 0 if not known yet.
    """
    for key in ("wgrad", "optimizer", "recompute"):
        found = asked(args, f"{key}=")
        if not found or word_of(args).order == STOCK:
            continue
        if args.segments == AUTO:
            yield f"{found} with --segments auto: which segments is not known; give a number"
            continue
        segments = {number for part in parts_of(args, key) for number in part.segments or ()}
        unknown = sorted(segments - {*range(num_segments)})
        if num_segments and unknown:
            yield (
                f"{found}: there is no segment {unknown[0]}, a rank holds {num_segments}; "
                f"give some of 0 to {num_segments - 1}"
            )


def may_try(args: Namespace, part: str) -> bool:
    """Tell whether ``--schedule auto`` may try a part of the word, such as ``step=next``.

    It may not if the user gives the part, or if an option refuses it.
    """
    key = part.partition("=")[0]
    if word_of(args).order != AUTO or word_of(args).value(key) is not None:
        return False
    asks = Namespace(**vars(args) | {"schedule": f"{args.schedule}:{part}"})
    return not any(refusals(asks, but="--schedule auto"))


def may_defer(args: Namespace) -> bool:
    """Tell whether ``auto`` may let DP.sync reach into the next iteration.

    With the distributed optimizer a deferred DP.sync gains nothing. With one hardware queue it
    would need slices, which ``auto`` does not try.
    """
    gains = not args.use_distributed_optimizer and not has_one_queue(args)
    return gains and may_try(args, "step=next")


def coded(args: Namespace, name: str) -> Switch:
    """Return the value of ``delta_param_gather`` or ``coded_grad_reduce``.

    ``auto`` becomes ``off`` if an option refuses what is coded.
    """
    is_auto = word_of(args).order == AUTO
    asks: Switch = getattr(args, name) or ("auto" if is_auto else "off")
    if asks != "auto":
        return asks
    if name == "coded_grad_reduce" and num_replicas(args) > 2 and asked(args, _FIXED_ORDER):
        return "off"  # sums of more than two numbers depend on their order
    on = Namespace(**vars(args) | {name: "on"})
    form = f"{flag_of(name)} on with {{}}"
    return "off" if any(refused(on, form, TABLE[form])) else "auto"


_STOCK = "drop it, or use --schedule stock"
_BOTH = "drop one of the two"
_NO_STEP = "drop it, or drop step=next"
_NO_TRACE = "drop it, or drop --trace"
_NAME_ONE = "drop it, or name a schedule"

_GRAPH = "a captured graph replays the order and the buffers that it was captured with"
_FSDP = "it replaces the gradient buckets of Megatron's DDP, which a schedule reduces"
_COMBINED = "it replaces the schedule by one that runs a forward and a backward as one"
_GTP = "gathers of weights are chained in the order in which the first iteration used them"
_SCALING = "delayed scaling reads what a rank has computed last, and stock's order is another"
_LATE_GRADS = "Megatron then reduces all gradients at the end of the iteration"
_STEP = "it changes the optimizer step, and segments are stepped one by one"
_AFTER = "it changes gradients that are reduced, and some are reduced in the next iteration"
_DUE = "it reads parameters between iterations, when some of their steps are still due"
_GRADS = "it reads gradients between iterations, when some are not reduced yet"
_WHOLE = "it reads whole parameters between iterations, when each replica has its shard"
_APART = "the operands of delayed weight gradients are not measured"
_TWICE = "both compare iterations, and one would change what the other compares"
_ENGINE = "Transformer Engine recomputes by itself"
_CHOOSES = "it chooses that itself"
_COMPARES = "it compares iterations, and that changes while it does"
_UNSHOWN = "never shown to train what stock does"

_FLAGS_OF_SHARDS = (
    "--use-distributed-optimizer and --overlap-grad-reduce and --overlap-param-gather"
)
# Options that change the optimizer's step or the gathering of parameters. They exclude `step=next`
# and `optimizer=replicated`, which step segment by segment.
_STEP_ROWS = {
    "--num-distributed-optimizer-instances above 1": "a segment is reduced and gathered in one "
    f"group of ranks, and an instance has its own; {_BOTH}",
    "--overlap-param-gather-with-optimizer-step, --use-precision-aware-optimizer, "
    "--optimizer-cpu-offload, --fp8-param-gather, --fp4-param-gather": f"{_STEP}; {_BOTH}",
}
_READERS = (
    "--save-params-interval, --log-params-norm, --qk-clip, "
    "--check-weight-hash-across-dp-replicas-interval"
)

TABLE: Mapping[str, Mapping[str, str]] = {
    "{} with a schedule of ours": {
        # Options that fix the order of an iteration.
        "--cuda-graph-impl, --enable-cuda-graph, --external-cuda-graph, "
        "--optimizer-cuda-graph": f"{_GRAPH}; {_STOCK}",
        "--fine-grained-activation-offloading": "it learns from the order of stock's first "
        "iteration when to copy which tensor; use --recompute-granularity selective",
        "--cpu-offloading-num-layers": "it expects every backward right after its forward; use "
        "--recompute-granularity full",
        "--moe-paged-stash": "its pages are laid out by the order of stock's first iteration; "
        "use --moe-layer-recompute",
        "--tensor-parallel-num-weight-shards above the ranks, "
        "--expert-tensor-parallel-num-weight-shards above the ranks": f"{_GTP}; {_STOCK}",
        # Options that replace the schedule, or the loop around it.
        "--overlap-moe-expert-parallel-comm": f"{_COMBINED}; drop it and give pairs=on, or use "
        "--schedule stock",
        "--delay-wgrad-compute, --ep-overlap-early-attn-memory-release": f"{_COMBINED}; {_STOCK}",
        "--defer-embedding-wgrad-compute": "stock's schedules compute the deferred gradients "
        "at their end, a plan does not; drop it",
        "--moe-expert-rank-capacity-factor": "an iteration that overflows its buffers is run "
        "again, a plan is run once; use --moe-expert-capacity-factor",
        "--perform-rl-step": "generation and training share an iteration, a plan has only "
        f"training; {_STOCK}",
        "--inprocess-restart": "our process groups and buffers are made once, when the process "
        "starts; start the job again from its last checkpoint, with --save and --load, as a "
        "requeued SLURM job does",
        # Options that change gradients, parameters or transfers as plans do not expect.
        "--use-megatron-fsdp, --use-torch-fsdp2": f"{_FSDP}; use --use-distributed-optimizer",
        "--optimizer that shards whole layers": "with --use-distributed-optimizer it shards "
        "whole layers, but a plan cuts other buckets; drop --use-distributed-optimizer, or use "
        "--schedule stock",
        "--hybrid-context-parallel": "micro-batches differ in length, and a plan's transfers "
        "have one shape; use --context-parallel-size alone",
        "--pipeline-model-parallel-layout with an m before the last stage": "multi-token "
        "prediction before the last stage sends tensors of another shape; move every m to the "
        "last stage",
        "--use-ring-exchange-p2p": "a ring exchange blocks, but a plan's transfers overlap "
        "compute; drop it",
        "--no-overlap-p2p-communication": "a plan's transfers overlap compute; drop it",
        "--pipeline-model-parallel-comm-backend ucc": "a plan's transfers run in groups of "
        "their own, over NCCL or gloo; drop it",
        # An option that would have no effect, without a warning.
        "--freeze-all-layers": "it freezes only models from a provider function, and ours is "
        "built from a configuration; drop it",
    },
    # Results that depend on the order of computations: see plan/recompute_order.py.
    "{} with another order than stock's": {
        "--fp8-format with --fp8-recipe delayed": f"{_SCALING}; use --fp8-recipe tensorwise, "
        "or --schedule 1f1b or interleaved",
    },
    "ahead= with {}": {
        "--fp8-format with --fp8-recipe delayed": f"{_SCALING}; drop it, or give --fp8-recipe "
        "tensorwise",
    },
    "wgrad=gaps with {}": {
        "--fp8-format with --fp8-recipe delayed": f"{_SCALING}; drop it, or give --fp8-recipe "
        "tensorwise",
    },
    "{} with a schedule without groups": {
        "--microbatch-group-size-per-virtual-pipeline-stage": "the schedule has no groups; "
        "drop it, or use --schedule interleaved",
    },
    "{} with a schedule with groups": {
        "--microbatch-group-size-per-virtual-pipeline-stage below the ranks": "ranks wait for "
        "one another when a group is smaller than --pipeline-model-parallel-size; give at "
        "least that many",
    },
    "{} with a plan file": {
        "--rampup-batch-size, --step-batch-size-schedule": "a plan is for one number of "
        "micro-batches; use --schedule",
        "wgrad= in the word, recompute= in the word, slices= in the word": "the actions of the "
        "plan say it; drop it",
    },
    "{} with --schedule auto": {
        **{
            settings: f"{rule}; drop it, give {key}={VALUES[key][0]} to rule it out, or name a "
            "schedule"
            for key, settings, rule in (
                ("optimizer", "optimizer=", _CHOOSES),
                ("step", "step=next", _CHOOSES),
                ("wgrad", "wgrad=", _CHOOSES),
                ("recompute", "recompute=early", _UNSHOWN),
                ("pairs", "pairs=on", _UNSHOWN),
            )
        },
        "--recompute-layers auto, --offload-activations auto": f"{_COMPARES}; {_NAME_ONE}",
        "--offload-activations on, --lazy-inter-segment, --preemptive-comm, --shard-segments, "
        "slices=on": f"{_UNSHOWN}; {_NAME_ONE}",
    },
    "ahead=auto with {}": {
        "--offload-activations": "each measures an iteration that the other changes; give a number",
    },
    "share= with {}": {"without step=next": "it is a share of what that defers; add step=next"},
    "{} with step=next": {
        "stock's schedule": "only a plan defers DP.sync; drop it, or give --schedule aiao",
        "--optimizer other than adam or sgd": "segments are stepped one by one, which this "
        "optimizer does not support; use --optimizer adam or sgd",
        **_STEP_ROWS,
        "--mtp-num-layers": f"{_AFTER}; {_NO_STEP}",
        "--log-num-zeros-in-grad, --save-wgrads-interval": f"{_GRADS}; {_NO_STEP}",
        _READERS: f"{_DUE}; {_NO_STEP}",
        "Megatron-Bridge": "its own loop steps and saves; drop step=next",
        "--timing-log-level": "its barriers are inside optimizer steps, which ranks take at "
        "different times; give --timing-log-level 0",
        "without --overlap-grad-reduce": f"{_LATE_GRADS}; add {{}}",
    },
    "{} with slices=on": {
        "stock's schedule": "only a plan has slices of DP.sync; drop it, or give --schedule aiao",
        "--preemptive-comm": f"its scheduler decides when slices start; {_BOTH}",
        "without --overlap-grad-reduce": f"{_LATE_GRADS}; add {{}}",
    },
    "weight gradients apart with {}": {
        "stock's schedule": "only a plan has them apart; give --schedule aiao",
        "--offload-activations": "what weight gradients are computed from would come back "
        f"for the backward and stay; {_BOTH}",
    },
    "wgrad= with {}": {
        "--schedule zb-h1, --schedule zb-h2": f"it has all weight gradients apart already; {_BOTH}",
    },
    "weight gradients apart in Megatron's layers with {}": {
        "--transformer-impl other than local": "only the linear layers of Megatron itself and "
        "of Transformer Engine are split in two; give --transformer-impl local or "
        "transformer_engine",
        "fused weight gradients": "in Megatron's own layers the kernel is a part of the "
        "backward; add --no-gradient-accumulation-fusion",
        "--num-experts": f"the linear layers of Megatron's own experts are not split; {_BOTH}",
    },
    # Limits of Transformer Engine's own split (`wgrad_store`, `backward_dw`).
    "weight gradients apart in Transformer Engine's with {}": {
        "Transformer Engine before 2.8": "its split of a backward is complete from 2.8 on; "
        "install that, or give --transformer-impl local",
        "--tp-comm-overlap": "Transformer Engine does not delay a weight gradient whose matmul "
        f"overlaps its own communication; {_BOTH}",
        "--use-transformer-engine-op-fuser": "fused operations compute their weight gradients "
        f"in the backward; {_BOTH}",
        "--mtp-use-repeated-layer": "a layer that a micro-batch passes twice has one gradient, "
        f"and Transformer Engine would compute two; {_BOTH}",
        "--overlap-dispatch-backward-with-experts-wgrad": "both say when the experts' weight "
        f"gradients are computed; {_BOTH}",
        "--num-experts and biases": "Transformer Engine does not split the gradients of "
        "experts' biases; add --disable-bias-linear",
    },
    "recompute=early with {}": {
        "stock's schedule": "only a plan has it apart; give --schedule 1f1b",
        "without --recompute-granularity full": "only what recomputes whole layers does so "
        "ahead of their backward; add it, with --recompute-method and --recompute-num-layers",
        "--distribute-saved-activations": "inputs are cut up until the backward gathers them; "
        f"{_BOTH}",
        "--fp8-format, --fp4-format": f"{_ENGINE}; {_BOTH}",
        "--offload-activations": "activations come back for the backward, not for what is "
        f"computed ahead of it; {_BOTH}",
    },
    "--shard-segments with {}": {
        "stock's schedule": "only a plan gathers by segment; give --schedule aiao",
        f"without {_FLAGS_OF_SHARDS}": "the shards are those that the optimizer updates, and "
        "each segment gathers its own; add {}",
        "one replica": "there is nobody to share parameters with; drop it",
    },
    "{} with --shard-segments": {
        "--fp8-format, --fp4-format": "Transformer Engine keeps converted copies of whole "
        f"parameters; {_BOTH}",
        "--num-distributed-optimizer-instances above 1": "an instance gathers among its own "
        f"replicas, and nothing has tested that; {_BOTH}",
        "--overlap-param-gather-with-optimizer-step": "it gathers the first segment behind its "
        f"step, and the next iteration begins by freeing it; {_BOTH}",
        _READERS: f"{_WHOLE}; {_BOTH}",
        "--use-nccl-ub": f"NCCL registers the buffers, and they are freed; {_BOTH}",
    },
    f"{_DELTA_ON} with {{}}": {
        "without --use-distributed-optimizer": "only replicas that step shards gather parameters; "
        "add {}",
        "one replica": "there is nobody to gather parameters from; drop it",
        "parameters in fp32": "what a step changes of 32 bits is about as long as they are; drop "
        "it, or train with --bf16 or --fp16",
        "--fp8-param-gather, --fp4-param-gather": f"these are gathered in 8 or 4 bits; {_BOTH}",
        "--shard-segments": "differences are from old parameters, which a replica then has only a "
        f"shard of; {_BOTH}",
        "--use-megatron-fsdp, --use-torch-fsdp2": "differences are from old parameters, which a "
        f"replica then has only a shard of; {_BOTH}",
        "--optimizer that shards whole layers": "it gathers layers of its own, not buckets; drop "
        "it",
        "--reuse-grad-buf-for-mxfp8-param-ag": "old parameters are overwritten by gradients; "
        f"{_BOTH}",
        "step=next": "segments are stepped one by one, without a wait in which replicas could "
        f"agree on lengths; {_BOTH}",
    },
    f"{_SUMS_ON} with {{}}": {
        "without --use-distributed-optimizer": "only gradients that are summed to shards are "
        "coded; add {}",
        "one replica": "there is nobody to sum gradients with; drop it",
        "gradients in fp16": "no code is for them; drop it, or add "
        "--accumulate-allreduce-grads-in-fp32",
        "--num-distributed-optimizer-instances above 1": "shards are summed over instances too, "
        f"and nothing codes that; {_BOTH}",
        "--ddp-reduce-scatter-with-fp32-accumulation": "it sends 16 bits and adds up in 32; "
        f"{_BOTH}",
        "--ddp-average-in-collective": f"NCCL then averages, and codes are only summed; {_BOTH}",
        "--use-megatron-fsdp, --use-torch-fsdp2": f"{_FSDP}; {_BOTH}",
        "--optimizer that shards whole layers": "its gradients are all-reduced; drop it",
        "--preemptive-comm": f"it sends slices of gradients; {_BOTH}",
        "--shard-segments": f"gradients are freed between iterations; {_BOTH}",
        "step=next": f"it sums parts of a segment's gradients in the next iteration; {_BOTH}",
    },
    "{} with --shard-segments gradients": {
        "slices=on": "a segment's gradients are freed before later computations start slices "
        "of them; give --shard-segments weights",
        "--save-wgrads-interval": "it saves whole gradients behind an iteration, when each "
        "replica has its shard; give --shard-segments weights",
    },
    "optimizer=sharded with {}": {
        "without --use-distributed-optimizer": "that is what shards it; add it, with "
        "--overlap-param-gather, or drop the part",
    },
    "optimizer= with {}": {
        "stock's schedule": "only a plan has segments; give --schedule aiao",
        f"without {_FLAGS_OF_SHARDS}": "it chooses which segments are updated in shards and "
        "gathered; add {}",
        "half of tied embeddings": "the first and the last segment add up gradients of the "
        "same word embeddings, so both are reduced alike; give both or neither",
        "one replica": "it steps everything in full already; drop it",
        "a plan file": f"a plan has its gathers; {_BOTH}",
    },
    "{} with optimizer=": {
        "--optimizer other than adam": "replicas that step the same shard get the same bits "
        "with element-wise steps alone; use --optimizer adam",
        **_STEP_ROWS,
        "--ddp-reduce-scatter-with-fp32-accumulation": "an all-reduce adds up in the type of "
        f"the gradients, so results would differ; {_BOTH}",
        "--shard-segments": f"one keeps parameters in shards, the other whole; {_BOTH}",
        "step=next": "a step that reaches into the next iteration is that of this replica's "
        f"shards; {_BOTH}",
        "--preemptive-comm": f"nothing has tested them together; {_BOTH}",
        "slices=on": f"slices of all segments are reduced alike, into shards; {_BOTH}",
    },
    "optimizer=auto with {}": {
        "ahead=auto, wgrad=gaps": f"{_TWICE}; give numbers, or segments, for one of them",
    },
    "--recompute-layers with {}": {
        "stock's schedule": "Megatron has one number for all stages; give --recompute-num-layers, "
        "or --schedule 1f1b",
        "--segments auto for given numbers": "how many stages there are is not known; give a "
        "number",
        "--recompute-granularity selective": "it counts layers that are recomputed as a whole; "
        f"{_BOTH}",
        "--recompute-method other than block": "groups of layers have no number of their own; "
        "give block, or drop it",
        "--offload-activations": "activations of some layers would stay and of some leave; "
        f"{_BOTH}",
        "--fp8-format, --fp4-format": f"{_ENGINE}; {_BOTH}",
    },
    # The measurement of one layer has to give the bytes of all layers.
    "--recompute-layers auto with {}": {
        settings: f"{rule}; give numbers, or {_BOTH}"
        for settings, rule in (
            ("--num-experts", "the bytes of a layer with experts change with each micro-batch"),
            ("--heterogeneous-layers-config-path", "layers differ, and one is measured"),
            ("--mtp-num-layers", "its layers are not measured"),
            (
                "pairs=on",
                "the bytes of two concurrent micro-batches cannot be measured separately",
            ),
            ("wgrad=, --schedule zb-h1, --schedule zb-h2", _APART),
            ("ahead=auto", "each would depend on the memory that the other leaves"),
        )
    },
    "pairs=on with {}": {
        "stock's schedule": "only a plan has pairs; give --schedule aiao",
        "--tensor-model-parallel-size 1 unless ranks share experts": "there is no "
        "tensor-parallel collective to overlap; drop it, or give at least 2",
        # Two micro-batches of other dispatchers would share more than the dispatcher's metadata.
        "--num-experts and --moe-token-dispatcher-type other than alltoall": "only an "
        "all-to-all hands over; give --moe-token-dispatcher-type alltoall",
        "--num-experts and --moe-input-jitter-eps, "
        "--num-experts and --moe-router-force-load-balancing, "
        "--num-experts and --moe-router-force-biased, "
        "--num-experts and --moe-enable-routing-replay": "it draws or records in the order in "
        f"which micro-batches run; {_BOTH}",
        "--attention-dropout, --hidden-dropout": "two micro-batches at a time draw other masks "
        "than one after the other; give 0, or drop pairs=on",
        "--schedule zb-h1, --schedule zb-h2": "weight gradients are computed apart for one "
        "micro-batch at a time; give --schedule 1f1b",
        "--timing-log-level above 1": "Megatron's timer of a forward measures one at a time; "
        "give --timing-log-level 1",
        "ahead=auto, wgrad=gaps, step=next with measured shares, "
        "--offload-activations auto": "what it measures are computations one at a time; give a "
        "number or segments, or --offload-activations on",
        "--transformer-impl transformer_engine and --tensor-model-parallel-size above 1": "its "
        "layers' collectives hand nothing over; give --transformer-impl local",
        "--fp8-format, --fp4-format": "Transformer Engine keeps the scales of one micro-batch at "
        f"a time; {_BOTH}",
        "--recompute-modules mla_up_proj and --tensor-model-parallel-size above 1": "a layer "
        "notes whether one micro-batch has it; drop that module, or pairs=on",
        "--context-parallel-size above 1": "ranks that share a sequence exchange keys and values "
        "in calls that hand nothing over; give 1, or drop pairs=on",
        # Options with process-wide state or further collectives.
        "--mtp-num-layers, --shard-segments, slices=on, --tp-comm-overlap, "
        "--distribute-saved-activations, --preemptive-comm, --te-rng-tracker, "
        "--use-transformer-engine-op-fuser, "
        "--transformer-impl inference_optimized": f"{_UNSHOWN}; {_BOTH}",
    },
    "{} with --preemptive-comm": {
        "stock's schedule": "it schedules the transfers of a plan; give --schedule aiao, or drop "
        "it",
        "--num-distributed-optimizer-instances above 1": "sums over the instances are not "
        f"sliced; {_BOTH}",
        "--ddp-reduce-scatter-with-fp32-accumulation": f"its all-to-alls are not sliced; {_BOTH}",
    },
    "--offload-activations with {}": {
        "stock's schedule": "the copies are actions of a plan; give --schedule aiao",
        "--distribute-saved-activations": "it puts shards together in the tensors that they "
        "were cut from, which have left; use --sequence-parallel, which saves shards of its "
        "own",
        "--fp8-format and full recomputation, --fp4-format and full recomputation, "
        "--fp8-format and --recompute-modules of the engine, "
        "--fp4-format and --recompute-modules of the engine": "Transformer Engine then "
        "recomputes by a checkpoint of its own, whose inputs nothing would offload; use "
        "--recompute-granularity selective with other modules than mlp, moe, shared_experts, "
        f"or {_BOTH}",
        "without recomputation": "what it starts from would leave, and there is none; add "
        "--recompute-granularity full or selective, or give --offload-activations on "
        "--no-gradient-accumulation-fusion",
    },
    "--lazy-inter-segment with {}": {
        "stock's schedule": "it sends itself; give --schedule aiao",
        "one segment": "nothing goes from the last rank to the first; drop it, or give "
        "--segments 2 or more",
    },
    "{} with --trace of stock's schedule": {
        "--cuda-graph-impl": "a captured graph replays what it computes without telling when; "
        f"{_NO_TRACE}",
        "--overlap-moe-expert-parallel-comm": "a forward and a backward run as one, and "
        f"neither has a time of its own; {_NO_TRACE}",
    },
}

"""``--recompute-layers``: the options that it excludes."""

from argparse import Namespace
from collections.abc import Iterator

from megatron.fold3d.config.layer_split import layers_per_rank
from megatron.fold3d.plan.schedule_word import AUTO
from megatron.fold3d.plan.schedules import SPLIT_SCHEDULES

_FLAG = "--recompute-layers"
_LIMIT = "--activation-memory-bytes"


def recompute_count_problems(
    args: Namespace, schedule: str, num_ranks: int, num_segments: int
) -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting ``--recompute-layers`` cannot run with."""
    yield from _limit_problems(args)
    if args.recompute_layers is None:
        return
    auto = args.recompute_layers == AUTO
    found = f"{_FLAG} {AUTO if auto else ','.join(map(str, args.recompute_layers))}"
    if schedule == "stock":
        yield (
            f"{found} with --schedule stock: Megatron has one number for all stages; give "
            "--recompute-num-layers, or --schedule 1f1b"
        )
        return
    if auto:
        yield from _not_measured(args, schedule, found)
    elif args.segments == "auto":
        yield f"{found} with --segments auto: how many stages there are is not known; give a number"
    elif len(args.recompute_layers) != num_ranks * num_segments:
        yield (
            f"{found}: these are {len(args.recompute_layers)} numbers, one for each stage, and the "
            f"plan has {num_ranks * num_segments} stages; give as many"
        )
    else:
        yield from _too_many(args, found, num_ranks, num_segments)
    if args.recompute_granularity not in (None, "full") or getattr(
        args, "recompute_activations", False
    ):
        yield (
            f"{found} with --recompute-granularity selective: it counts layers that are recomputed "
            "as a whole; drop one of the two"
        )
    if args.recompute_method not in (None, "block"):
        yield (
            f"{found} with --recompute-method {args.recompute_method}: groups of layers have no "
            "number of their own; give block, or drop it"
        )
    if args.offload_activations != "off":
        yield (
            f"{found} with --offload-activations {args.offload_activations}: activations of some "
            "layers would stay and of some leave; drop one of the two"
        )
    for form, value in (("fp8", args.fp8), ("fp4", args.fp4)):
        if value:
            yield (
                f"{found} with --{form}-format: Transformer Engine recomputes by itself; drop one "
                "of the two"
            )


def _limit_problems(args: Namespace) -> Iterator[str]:
    """Refuse a limit that nothing uses or below one byte, and `auto` on a CPU without a limit."""
    limit, auto = args.activation_memory_bytes, args.recompute_layers == AUTO
    if limit is not None and not auto and args.offload_activations == "off":
        yield (
            f"{_LIMIT} {limit} without {_FLAG} auto or --offload-activations: only these use the "
            "limit; drop it, or add one of them"
        )
    elif limit is not None and limit < 1:
        yield f"{_LIMIT} {limit}: saved activations take some bytes; give at least 1"
    elif limit is None and auto and args.device == "cpu":
        yield (
            f"{_FLAG} auto with --device cpu: a CPU has no device memory to measure; "
            f"give {_LIMIT} N"
        )


def _not_measured(args: Namespace, schedule: str, found: str) -> Iterator[str]:
    """Refuse `auto` if its measurement of one layer does not give the bytes of all."""
    for flag, is_there, why in (
        (
            f"--num-experts {args.num_experts}",
            args.num_experts,
            "the bytes of a layer with experts change with each micro-batch",
        ),
        (
            "--heterogeneous-layers-config-path",
            args.heterogeneous_layers_config_path,
            "layers differ, and one is measured",
        ),
        (
            f"--mtp-num-layers {args.mtp_num_layers}",
            args.mtp_num_layers,
            "its layers are not measured",
        ),
        (
            "pairs=on",
            args.overlap_tensor_parallel,
            "the bytes of two concurrent micro-batches cannot be measured separately",
        ),
        (
            "wgrad=",
            args.delay_weight_grads,
            "the operands of delayed weight gradients are not measured",
        ),
        (
            f"--schedule {schedule}",
            schedule in SPLIT_SCHEDULES,
            "the operands of delayed weight gradients are not measured",
        ),
        (
            "ahead=auto",
            args.forwards_ahead == AUTO,
            "each would depend on the memory that the other leaves",
        ),
    ):
        if is_there:
            yield f"{found} with {flag}: {why}; give numbers, or drop one of the two"


def _too_many(args: Namespace, found: str, num_ranks: int, num_segments: int) -> Iterator[str]:
    """Refuse numbers above the layers of a stage, if all stages have equally many."""
    ends = (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers)
    if args.pipeline_model_parallel_layout is not None or ends != (None, None):
        return  # the executor looks when it has the model
    per_rank = layers_per_rank(args) if args.num_layers else ()
    if not per_rank or per_rank[0] % num_segments:
        return
    layers = per_rank[0] // num_segments
    for stage, number in enumerate(args.recompute_layers):
        if number > layers:
            yield (
                f"{found}: {number} layers of stage {stage} are to be recomputed, and a stage has "
                f"{layers}; give at most as many"
            )
            return

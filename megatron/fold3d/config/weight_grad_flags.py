"""``wgrad=``: what a split backward cannot be combined with.

Schedules such as zb-h1 split the backward without that key, and have the same limits.
"""

from argparse import Namespace
from collections.abc import Iterator
from importlib import metadata

from megatron.fold3d.config.bucket_flags import delays_dp_sync, gathers_by_plan
from megatron.fold3d.plan.schedule_word import AUTO, Part, parts_of
from megatron.fold3d.plan.schedules import SPLIT_SCHEDULES

_ELSEWHERE = (AUTO, "stock", "plan-file")  # where weight gradients are is not the word's
OLDEST_ENGINE = 2, 8  # as Megatron asks for with its own --delay-wgrad-compute


def split_segments(args: Namespace, schedule: str, num_segments: int) -> tuple[int, ...]:
    """Return the segments whose weight gradients may be apart from their backwards."""
    if schedule in SPLIT_SCHEDULES:
        return (0,)
    delayed: tuple[int, ...] | str = args.delay_weight_grads
    return tuple(range(num_segments)) if isinstance(delayed, str) else delayed


def weight_grad_part(args: Namespace) -> str:
    """Return ``wgrad=`` as the word has it."""
    delayed = args.delay_weight_grads
    if not isinstance(delayed, tuple):
        return str(Part("wgrad", "gaps"))
    behind = args.behind_backwards
    last = tuple(segment for segment in delayed if segment not in behind)
    return ":".join(map(str, parts_of("wgrad", (("behind", behind), ("last", last)))))


def weight_grad_problems(args: Namespace, schedule: str, num_segments: int) -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting that a split backward cannot run with.

    Args:
        args: Megatron's namespace.
        schedule: the schedule that will run.
        num_segments: segments per rank; 0 if not known yet.
    """
    auto = args.delay_weight_grads == AUTO
    found = "W in the plan" if schedule == "plan-file" else weight_grad_part(args)
    if (most := args.most_activations) is not None and (not auto or most < 1):
        yield (
            f"held={most}: it limits what wgrad=gaps holds, and a rank holds at least one; give "
            "both, or drop it"
        )
    if schedule in SPLIT_SCHEDULES:
        if args.delay_weight_grads:
            yield (
                f"{found} with --schedule {schedule}: it has all weight gradients apart already; "
                "drop one of the two"
            )
        found = f"--schedule {schedule}"
    elif not args.delay_weight_grads:
        return
    elif schedule == "stock":
        yield f"{found} with --schedule stock: only a plan has them apart; give --schedule aiao"
        return
    if schedule in SPLIT_SCHEDULES:
        pass  # these have one segment, which is checked elsewhere
    elif args.segments == "auto":  # not imported: its module brings the simulator along
        yield f"{found} with --segments auto: which segments that are is not known; give a number"
    elif (
        not auto
        and num_segments
        and (unknown := [s for s in args.delay_weight_grads if not 0 <= s < num_segments])
    ):
        yield (
            f"{found}: there is no segment {unknown[0]}, a rank holds {num_segments}; "
            f"give some of 0 to {num_segments - 1}"
        )
    if args.transformer_impl == "transformer_engine":
        yield from _engine_problems(args, found)
    else:
        yield from _local_problems(args, found)
    if args.offload_activations != "off":
        yield (
            f"{found} with --offload-activations {args.offload_activations}: what weight gradients "
            "are computed from would come back for the backward and stay; drop one of the two"
        )


def place_problems(args: Namespace, schedule: str, num_segments: int) -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting that `wgrad=behind` cannot run with.

    Args:
        args: Megatron's namespace.
        schedule: the schedule that will run.
        num_segments: segments per rank; 0 if not known yet.
    """
    behind, sharded = args.behind_backwards, args.use_distributed_optimizer
    if not behind or schedule in (*_ELSEWHERE, *SPLIT_SCHEDULES):
        return
    found = str(Part("wgrad", "behind", behind))
    if args.backward_share is not None and sharded:
        yield (
            f"{found} with step=next and --use-distributed-optimizer: what is deferred is cut "
            "shard by shard, not parameter by parameter; give last, or drop one of the others"
        )
    elif not args.overlap_grad_reduce:
        yield (
            f"{found} without --overlap-grad-reduce: Megatron then reduces all gradients at the "
            "end of the iteration; add --overlap-grad-reduce, or give last"
        )
    elif sharded and num_segments == 1:
        yield (
            f"{found} with --use-distributed-optimizer and one segment: it needs a plan that "
            "gathers parameters, and Megatron turns alignment of gathers off where there are no "
            "virtual stages; give last, or --segments 2 or more"
        )
    elif sharded and not gathers_by_plan(args):
        yield (
            f"{found} with --use-distributed-optimizer: it needs a plan that gathers parameters; "
            "add --overlap-param-gather, without --no-align-param-gather"
        )
    elif other := next(delays_dp_sync(args), None):
        yield (
            f"{found} with {other}: DP.sync then starts where that says, not as soon as gradients "
            "are complete; give last, or drop the other"
        )


def _local_problems(args: Namespace, found: str) -> Iterator[str]:
    if args.transformer_impl != "local":
        yield (
            f"{found} with --transformer-impl {args.transformer_impl}: only the linear layers of "
            "Megatron itself and of Transformer Engine are split in two; give --transformer-impl "
            "local or transformer_engine"
        )
    if args.gradient_accumulation_fusion:
        yield (
            f"{found} with fused weight gradients: in Megatron's own layers the kernel is a part "
            "of the backward; add --no-gradient-accumulation-fusion"
        )
    if args.num_experts:
        yield (
            f"{found} with --num-experts {args.num_experts}: the linear layers of Megatron's own "
            "experts are not split; drop one of the two"
        )


def _engine_problems(args: Namespace, found: str) -> Iterator[str]:
    """Yield what Transformer Engine's own split (``wgrad_store``, ``backward_dw``) cannot do."""
    if (version := _engine_version()) and version < OLDEST_ENGINE:
        installed, oldest = (".".join(map(str, v)) for v in (version, OLDEST_ENGINE))
        yield (
            f"{found} with Transformer Engine {installed}: its split of a backward is complete "
            f"from {oldest} on; install that, or give --transformer-impl local"
        )
    if args.tp_comm_overlap:
        yield (
            f"{found} with --tp-comm-overlap: Transformer Engine does not delay a weight gradient "
            "whose matmul overlaps its own communication; drop one of the two"
        )
    if args.use_transformer_engine_op_fuser:
        yield (
            f"{found} with --use-transformer-engine-op-fuser: fused operations compute their "
            "weight gradients in the backward; drop one of the two"
        )
    if args.mtp_use_repeated_layer:
        yield (
            f"{found} with --mtp-use-repeated-layer: a layer that a micro-batch passes twice has "
            "one gradient, and Transformer Engine would compute two; drop one of the two"
        )
    if args.overlap_dispatch_backward_with_experts_wgrad:
        yield (
            f"{found} with --overlap-dispatch-backward-with-experts-wgrad: both say when the "
            "experts' weight gradients are computed; drop one of the two"
        )
    if args.num_experts and args.add_bias_linear:
        yield (
            f"{found} with --num-experts {args.num_experts} and biases: Transformer Engine does "
            "not split the gradients of experts' biases; add --disable-bias-linear"
        )


def _engine_version() -> tuple[int, ...] | None:
    """Return the first two numbers of Transformer Engine's version, without importing it."""
    try:
        text = metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return None
    return tuple(int(number) for number in text.split(".")[:2])

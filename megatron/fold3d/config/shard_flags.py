"""``--shard-segments``: the flag, and what it cannot be combined with."""

from argparse import Namespace
from collections.abc import Iterator

from megatron.fold3d.config.argument_group import ArgumentGroup
from megatron.fold3d.config.refusals import Refusal, refused

_NEEDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


def add_shard_flags(group: ArgumentGroup) -> None:
    """Add ``--shard-segments``."""
    group.add_argument(
        "--shard-segments",
        choices=("off", "weights", "gradients"),
        default="off",
        help="weights: keep a segment's parameters whole only while it computes. Each replica then "
        "holds its shard of them, and they are gathered once for the segment's forwards and once "
        "for its backwards. gradients: also keep its gradients whole only until they are reduced, "
        "and then a shard of them (default: off).",
    )


def shard_problems(args: Namespace, schedule: str) -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting ``--shard-segments`` cannot run with."""
    if args.shard_segments == "off":
        return
    found = f"--shard-segments {args.shard_segments}"
    if schedule == "stock":
        yield f"{found} with --schedule stock: only a plan gathers by segment; give --schedule aiao"
        return
    if missing := [flag for flag in _NEEDED if not getattr(args, flag[2:].replace("-", "_"))]:
        yield (
            f"{found} without {' and '.join(missing)}: the shards are those that the optimizer "
            f"updates, and each segment gathers its own; add {' '.join(missing)}"
        )
    if getattr(args, "data_parallel_size", None) == 1:  # known once Megatron has validated
        yield f"{found} with one replica: there is nobody to share parameters with; drop it"
    yield from refused(REFUSALS, args, schedule, found)
    if args.shard_segments == "gradients":
        yield from refused(GRADIENT_REFUSALS, args, schedule, found)


_READS = "it reads whole parameters between iterations, when each replica has its shard"
_WHOLE = "Transformer Engine keeps converted copies of whole parameters"
_DROP = "drop one of the two"

REFUSALS = (
    Refusal("--fp8-format", "fp8", _WHOLE, _DROP),
    Refusal("--fp4-format", "fp4", _WHOLE, _DROP),
    Refusal(
        "--num-distributed-optimizer-instances",
        "num_distributed_optimizer_instances",
        "an instance gathers among its own replicas, and nothing has tested that",
        _DROP,
        found=lambda args: args.num_distributed_optimizer_instances > 1,
    ),
    Refusal("--log-params-norm", "log_params_norm", _READS, _DROP),
    Refusal("--save-params-interval", "save_params_interval", _READS, _DROP),
    Refusal("--qk-clip", "qk_clip", _READS, _DROP),
    Refusal(
        "--check-weight-hash-across-dp-replicas-interval",
        "check_weight_hash_across_dp_replicas_interval",
        _READS,
        _DROP,
    ),
    Refusal("--use-nccl-ub", "nccl_ub", "NCCL registers the buffers, and they are freed", _DROP),
)

GRADIENT_REFUSALS = (
    Refusal(
        "slices=on",
        "dp_slices",
        "a segment's gradients are freed before later computations start slices of them",
        "give --shard-segments weights",
        found=lambda args: args.dp_slices == "on",
    ),
    Refusal(
        "--save-wgrads-interval",
        "save_wgrads_interval",
        "it saves whole gradients behind an iteration, when each replica has its shard",
        "give --shard-segments weights",
    ),
)

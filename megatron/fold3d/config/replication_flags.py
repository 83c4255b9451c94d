"""``optimizer=replicated`` and ``optimizer=auto``, and the options that they exclude."""

from argparse import Namespace
from collections.abc import Iterator

from megatron.fold3d.config.optimizer_refusals import STEP_REFUSALS
from megatron.fold3d.config.refusals import Refusal, refused
from megatron.fold3d.plan.schedule_word import AUTO, Part

_AUTO = Part("optimizer", AUTO)
_NEEDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


def given_segments(args: Namespace) -> tuple[int, ...]:
    """Return the segments that the user names."""
    given: tuple[int, ...] | str = args.replicate_optimizer
    return () if isinstance(given, str) else given


def ties_embeddings(args: Namespace) -> bool:
    """Tell whether the first and the last stage, on two ranks, share word embeddings."""
    tied = not args.untie_embeddings_and_output_weights
    return bool(tied and args.pipeline_model_parallel_size > 1)


def replication_problems(args: Namespace, schedule: str, num_segments: int) -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting of ``optimizer=`` cannot run with.

    Args:
        args: Megatron's namespace.
        schedule: the schedule that will run.
        num_segments: segments per rank; 0 if not known yet.
    """
    if not args.replicate_optimizer:
        if "optimizer" in args.schedule_keys and not args.use_distributed_optimizer:
            yield (
                "optimizer=sharded without --use-distributed-optimizer: that is what shards it; "
                "add it, with --overlap-param-gather, or drop the part"
            )
        return
    segments = given_segments(args)
    found = str(Part("optimizer", "replicated", segments) if segments else _AUTO)
    if schedule == "stock":
        yield f"{found} with --schedule stock: only a plan has segments; give --schedule aiao"
        return
    if missing := [flag for flag in _NEEDED if not getattr(args, flag[2:].replace("-", "_"))]:
        yield (
            f"{found} without {' and '.join(missing)}: it chooses which segments are updated in "
            f"shards and gathered; add {' '.join(missing)}"
        )
    if args.segments == "auto":  # not imported: its module brings the simulator along
        yield f"{found} with --segments auto: which segments that are is not known; give a number"
    elif num_segments and (unknown := [s for s in segments if not 0 <= s < num_segments]):
        yield (
            f"{found}: there is no segment {unknown[0]}, a rank holds {num_segments}; "
            f"give some of 0 to {num_segments - 1}"
        )
    elif not segments:
        yield from _auto_problems(args, schedule, found)
    elif num_segments and _halves_embeddings(args, num_segments):
        yield (
            f"{found} with tied embeddings: segments 0 and {num_segments - 1} add up gradients of "
            "the same parameters, so both are reduced alike; give both or neither, or add "
            "--untie-embeddings-and-output-weights"
        )
    if getattr(args, "data_parallel_size", None) == 1:  # known once Megatron has validated
        yield f"{found} with one replica: it steps everything in full already; drop it"
    yield from refused(REFUSALS, args, schedule, found)


def _auto_problems(args: Namespace, schedule: str, found: str) -> Iterator[str]:
    if schedule == "plan-file":
        yield f"{found} with --schedule plan=FILE: a plan has its gathers; drop one of the two"
    for part, name in (("ahead=auto", "forwards_ahead"), ("wgrad=gaps", "delay_weight_grads")):
        if getattr(args, name) == AUTO:
            yield (
                f"{found} with {part}: both compare iterations, and one would change what the "
                "other compares; give numbers, or segments, for one of them"
            )


def _halves_embeddings(args: Namespace, num_segments: int) -> bool:
    ends = {0, num_segments - 1}
    return ties_embeddings(args) and len(ends.intersection(given_segments(args))) == 1 < len(ends)


_DROP = "drop one of the two"

REFUSALS = (
    Refusal(
        "--optimizer",
        "optimizer",
        "replicas that step the same shard get the same bits with element-wise steps alone",
        "use --optimizer adam",
        found=lambda args: args.optimizer != "adam",
    ),
    *STEP_REFUSALS,
    Refusal(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        "ddp_reduce_scatter_with_fp32_accumulation",
        "an all-reduce adds up in the type of the gradients, so results would differ",
        _DROP,
    ),
    Refusal(
        "--shard-segments",
        "shard_segments",
        "one keeps parameters in shards, the other whole",
        _DROP,
        found=lambda args: args.shard_segments != "off",
    ),
    Refusal(
        "step=next",
        "backward_share",
        "a step that reaches into the next iteration is that of this replica's shards",
        _DROP,
        found=lambda args: args.backward_share is not None,
    ),
    Refusal("--preemptive-comm", "preemptive_comm", "nothing has tested them together", _DROP),
    Refusal(
        "slices=on",
        "dp_slices",
        "slices of all segments are reduced alike, into shards",
        _DROP,
        found=lambda args: args.dp_slices == "on",
    ),
)

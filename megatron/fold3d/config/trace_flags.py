"""``--trace`` and ``--trace-iterations``: the flags, and what cannot be recorded."""

import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from megatron.fold3d.config.argument_group import ArgumentGroup
from megatron.fold3d.config.refusals import Refusal, refused

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def add_trace_flags(group: ArgumentGroup) -> None:
    """Add ``--trace`` and ``--trace-iterations``."""
    group.add_argument(
        "--trace",
        type=Path,
        metavar="DIR",
        help="Record when each action begins and ends on each rank, and write one file per rank "
        "into DIR; see `fold3d trace`.",
    )
    group.add_argument(
        "--trace-iterations",
        metavar="A-B",
        help="The iterations to record, as the log numbers them (default: the fourth and the "
        "fifth of this run).",
    )


def iterations(text: str | None) -> range | None:
    """Return the iterations that ``4-5`` or ``4`` stands for; None if the flag is not given.

    Raises:
        ValueError: the text stands for no iterations.
    """
    if text is None:
        return None
    match = _RANGE.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f"--trace-iterations {text}: it is the first and the last iteration, from 1 on; "
            "give 4-5, say"
        )
    return range(first, last + 1)


def trace_problems(args: Namespace, schedule: str) -> Iterator[str]:
    """Yield one message (found, rule, fix) for each setting that ``--trace`` cannot run with."""
    try:
        chosen = iterations(args.trace_iterations)
    except ValueError as error:
        yield str(error)
        chosen = None
    if args.trace is None:
        if args.trace_iterations is not None:
            yield (
                f"--trace-iterations {args.trace_iterations} without --trace: there is no folder "
                "to write to; give --trace DIR"
            )
        return

    from megatron.fold3d.config.run_folders import unwritable

    yield from unwritable("--trace", args.trace, "traces")
    if chosen is not None and args.train_iters is not None and chosen[-1] > args.train_iters:
        yield (
            f"--trace-iterations {args.trace_iterations} with --train-iters {args.train_iters}: "
            "the run ends before; give iterations that it has"
        )
    yield from refused(REFUSALS, args, schedule, "--trace")


_GRAPH = "a captured graph replays what it computes without telling when"
_DROP = "drop it, or drop --trace"

REFUSALS = (
    Refusal(
        "--cuda-graph-impl",
        "cuda_graph_impl",
        _GRAPH,
        _DROP,
        found=lambda args: args.cuda_graph_impl != "none",
        schedules=frozenset({"stock"}),
    ),
    Refusal(
        "--overlap-moe-expert-parallel-comm",
        "overlap_moe_expert_parallel_comm",
        "a forward and a backward run as one, and neither has a time of its own",
        _DROP,
        schedules=frozenset({"stock"}),
    ),
)


def records_tp_sync(args: Namespace) -> bool:
    """Return whether a trace has the collectives of layers: those of Megatron's own.

    Transformer Engine takes the process group apart, and experts ask more of it than its wrapper
    passes on, unless they send tokens by all-to-all.
    """
    wraps = args.transformer_impl == "local" and not args.tp_comm_overlap
    if args.num_experts:
        wraps = wraps and args.moe_token_dispatcher_type == "alltoall"
    ranks = args.tensor_model_parallel_size * (args.expert_model_parallel_size or 1)
    return bool(args.trace is not None and ranks > 1 and wraps)

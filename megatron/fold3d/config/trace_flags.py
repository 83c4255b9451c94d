"""``--trace`` and ``--trace-iterations``: the recorded iterations, and conditions of a trace."""

import re
from argparse import Namespace
from collections.abc import Iterator

from megatron.fold3d.config.run_folders import unwritable

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def iterations(text: str | None) -> range | None:
    """Return the iterations in a text such as ``4-5`` or ``4``; None if the flag is not given.

    Raises:
        ValueError: the text is not one or two numbers in order.
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


def trace_problems(args: Namespace) -> Iterator[str]:
    """Yield one message (found, rule, fix) for each setting that excludes ``--trace``."""
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
    yield from unwritable("--trace", args.trace, "traces")
    if chosen is not None and args.train_iters is not None and chosen[-1] > args.train_iters:
        yield (
            f"--trace-iterations {args.trace_iterations} with --train-iters {args.train_iters}: "
            "the run ends before; give iterations that it has"
        )


def records_tp_sync(args: Namespace) -> bool:
    """Return whether a trace records layers' collectives: Megatron's own code has to call them.

    Transformer Engine unwraps the process group of tensor-parallel layers. Experts call methods
    that our wrapper of their group does not have, unless they send tokens by all-to-all.
    """
    tensor_ranks = args.tensor_model_parallel_size
    wraps = tensor_ranks == 1 or (args.transformer_impl == "local" and not args.tp_comm_overlap)
    if args.num_experts:
        wraps = wraps and args.moe_token_dispatcher_type == "alltoall"
    ranks = tensor_ranks * (args.expert_model_parallel_size or 1)
    return bool(args.trace is not None and ranks > 1 and wraps)

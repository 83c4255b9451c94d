"""``--checkpoint-interval-s``, and what failures leave of a job's time, in words."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from math import inf

from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.goodput import Goodput, goodput
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.sizes import Setup


def add_checkpoint_option(parser: ArgumentParser) -> None:
    """Add the option that says how often a job writes checkpoints."""
    parser.add_argument(
        "--checkpoint-interval-s",
        type=float,
        metavar="S",
        help="training between two checkpoints, on a cluster with gpu_mtbf_s (default: Daly's, "
        "nearly the best)",
    )


def goodput_of(args: Namespace, known: tuple[ModelShape, Cluster, Setup] | None) -> Goodput | None:
    """Return what failures leave of a job's time; None if none are known.

    Args:
        args: the command's arguments.
        known: the model, the cluster and the setup.

    Raises:
        ValueError: an interval is given that cannot be, or without a cluster that fails.
    """
    interval_s = args.checkpoint_interval_s
    if interval_s is not None and not 0 < interval_s < inf:
        raise ValueError(f"--checkpoint-interval-s {interval_s}: give seconds above zero")
    left = goodput(*known, interval_s) if known else None
    if left is None and interval_s is not None:
        raise ValueError(
            f"--checkpoint-interval-s {interval_s}: nothing fails here; give --model, and a "
            "--cluster with gpu_mtbf_s, such as llama3-h100x4096"
        )
    return left


def goodput_lines(left: Goodput | None, iteration_s: float) -> Iterator[str]:
    """Yield what is left of a job's time, and what an iteration takes of it with all else."""
    if left is None:
        return
    yield ""
    yield (
        f"goodput           {left.share:.1%} of the time: a failure every "
        f"{left.failures_s / 3600:.3g} h, a checkpoint of {left.checkpoint_s:.3g} s every "
        f"{left.interval_s:.4g} s, a restart of {left.restart_s:.4g} s"
    )
    if left.share:
        yield f"with failures     {iteration_s / left.share:.6g} s for an iteration, in the mean"

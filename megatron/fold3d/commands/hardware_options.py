"""The options that name a model and a cluster, and what they stand for."""

from argparse import ArgumentParser, Namespace
from dataclasses import replace

from megatron.fold3d.analysis.cluster import NODES, Cluster, cluster
from megatron.fold3d.analysis.model import SHAPES


def add_hardware_options(parser: ArgumentParser, *, required: bool) -> None:
    """Add ``--model``, ``--cluster`` and ``--task-overhead-s``."""
    parser.add_argument(
        "--model",
        required=required,
        metavar="NAME",
        help=f"{', '.join(SHAPES)}, or layers-hidden-heads[-sequence] such as 24-2048-16",
    )
    parser.add_argument(
        "--cluster",
        required=required,
        metavar="NAME",
        help="<node>x<GPUs>[-<Gb/s per node>g] such as a100x128-200g, with a node of "
        f"{', '.join(NODES)}; or a .json or .toml file with the fields of a cluster",
    )
    parser.add_argument(
        "--task-overhead-s",
        type=float,
        metavar="S",
        help="what starting a forward or backward of one model chunk costs (default: the "
        "cluster's, 0 for those that have a name)",
    )


def named_cluster(args: Namespace) -> Cluster:
    """Return the cluster of ``args``.

    Raises:
        ValueError: there is none of this name, or a number of it cannot be.
    """
    found = cluster(args.cluster)
    if args.task_overhead_s is None:
        return found
    return replace(found, task_overhead_s=args.task_overhead_s)

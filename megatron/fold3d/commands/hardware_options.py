"""The options that name a model and a cluster, and what they stand for."""

from argparse import ArgumentParser, Namespace
from dataclasses import fields, replace

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
        ValueError: there is none of this name, or its file describes none.
    """
    try:
        found = cluster(args.cluster)
    except TypeError:
        raise ValueError(
            f"{args.cluster}: found text where a number belongs; only a cluster's name is text"
        ) from None
    if args.task_overhead_s is not None:
        found = replace(found, task_overhead_s=args.task_overhead_s)
    for field in fields(found):
        value = getattr(found, field.name)
        if field.name == "name":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{args.cluster}: found {field.name}={value!r}; it is a number")
        if field.name in ("num_nodes", "gpus_per_node") and value != int(value):
            raise ValueError(f"{args.cluster}: found {field.name}={value}; it is a whole number")
        may_be_zero = field.name.endswith(("latency_s", "overhead_s"))
        if not (value > 0 or (may_be_zero and value == 0)):
            rule = "zero or more" if may_be_zero else "above zero"
            raise ValueError(f"{args.cluster}: found {field.name}={value}; it is {rule}")
    return replace(found, num_nodes=int(found.num_nodes), gpus_per_node=int(found.gpus_per_node))

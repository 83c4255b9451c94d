"""The options that name a model and a cluster, and what they stand for."""

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from math import inf

from megatron.fold3d.predict.cost_model.cluster import NODES, Cluster, cluster
from megatron.fold3d.predict.cost_model.model_shape import SHAPES, ModelShape, model_shape


def add_hardware_options(parser: ArgumentParser, *, required: bool) -> None:
    """Add ``--model``, ``--cluster``, and what was measured of them."""
    parser.add_argument(
        "--model",
        required=required,
        metavar="NAME",
        help=f"{', '.join(SHAPES)}; or layers-hidden-heads[-sequence] such as 24-2048-16; or a "
        ".json or .toml file with the fields of a model's shape",
    )
    parser.add_argument(
        "--cluster",
        required=required,
        metavar="NAME",
        help="<node>x<GPUs>[-<Gb/s per node>g] such as a100x128-200g, with a node of "
        f"{', '.join(NODES)}; or a .json or .toml file with the fields of a cluster",
    )
    parser.add_argument(
        "--layer-forward-s",
        type=float,
        metavar="S",
        help="what one layer's forward of one sequence was measured to take on one GPU (default: "
        "its FLOPs at the rate and the efficiency of the cluster's GPUs)",
    )
    parser.add_argument(
        "--task-overhead-s",
        type=float,
        metavar="S",
        help="what starting a forward or backward of one model chunk costs (default: the "
        "cluster's, 0 for those that have a name)",
    )
    parser.add_argument(
        "--iteration-overhead-s",
        type=float,
        metavar="S",
        help="what an iteration was measured to cost beside its forwards, backwards and network "
        "(default: the cluster's, 0 for those that have a name)",
    )


def named_hardware(args: Namespace) -> tuple[ModelShape, Cluster]:
    """Return the model and the cluster of ``args``.

    Raises:
        ValueError: there is none of this name, or a number of it cannot be.
    """
    shape, found = model_shape(args.model), cluster(args.cluster)
    if (layer_s := args.layer_forward_s) is not None:
        if not 0 < layer_s < inf:
            raise ValueError(f"--layer-forward-s {layer_s}: give seconds above zero")
        flops_per_s = shape.layer_flops(0) / layer_s / found.compute_efficiency
        found = replace(found, gpu_flops_per_s=flops_per_s)
    for overhead in ("task_overhead_s", "iteration_overhead_s"):
        if (seconds := getattr(args, overhead)) is not None:
            found = replace(found, **{overhead: seconds})
    return shape, found

"""The options that name a model and a cluster, without loading any of these."""

from argparse import ArgumentParser

ONE_OF = "one that `fold3d simulate --help` lists"


def add_hardware_flags(
    parser: ArgumentParser,
    *,
    required: bool,
    model_required: bool | None = None,
    models: str = ONE_OF,
    nodes: str = ONE_OF,
) -> None:
    """Add ``--model``, ``--cluster``, and what was measured of them.

    Args:
        parser: the command's parser.
        required: whether a run needs them.
        model_required: whether it needs the model, if that differs.
        models: the names of models, for the help.
        nodes: the names of nodes, for the help.
    """
    parser.add_argument(
        "--model",
        required=required if model_required is None else model_required,
        metavar="NAME",
        help=f"{models}; or layers-hidden-heads[-sequence] such as 24-2048-16; or a "
        ".json or .toml file with the fields of a model's shape",
    )
    parser.add_argument(
        "--cluster",
        required=required,
        metavar="NAME",
        help="<node>x<GPUs>[-<Gb/s per node>g] such as a100x128-200g, with a node of "
        f"{nodes}; or a .json or .toml file with the fields of a cluster",
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
    parser.add_argument(
        "--straggler-sigma",
        type=float,
        metavar="X",
        help="standard deviation of GPUs' times for the same computation, as a part of their mean "
        "(default: the cluster's, 0 for those that have a name)",
    )

"""The options for costs, and which of them are given. `cost_options` says what they stand for."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from megatron.fold3d.commands.hardware_flags import ONE_OF, add_hardware_flags

SECONDS = ("forward_s", "backward_s", "recompute_s", "p2p_s", "grad_sync_s", "tp_sync_s")
FILE = ("costs",)
MODEL = (
    *("model", "cluster", "tp", "dp", "micro_batch_size", "recompute"),
    *("distributed_optimizer", "fp32", "grad_reduce_in_bf16", "layer_forward_s", "task_overhead_s"),
    *("iteration_overhead_s", "straggler_sigma", "use_tp_pp_dp_mapping"),
)


def add_cost_flags(parser: ArgumentParser, *, models: str = ONE_OF, nodes: str = ONE_OF) -> None:
    """Add the options of all three sources; at most one source is given.

    Args:
        parser: the command's parser.
        models: the names of models, for the help.
        nodes: the names of nodes, for the help.
    """
    units = parser.add_argument_group("costs in numbers", "of one micro-batch in one model chunk")
    units.add_argument("--forward-s", type=float, metavar="S", help="(default: 1)")
    units.add_argument("--backward-s", type=float, metavar="S", help="(default: 2)")
    units.add_argument(
        "--recompute-s",
        type=float,
        metavar="S",
        help="of --backward-s, what a recomputation takes (default: 0)",
    )
    units.add_argument(
        "--tp-sync-s",
        type=float,
        metavar="S",
        help="of --forward-s, tensor-parallel collectives; a backward has as much (default: 0)",
    )
    units.add_argument("--p2p-s", type=float, metavar="S", help="one transfer (default: 0)")
    units.add_argument(
        "--grad-sync-s", type=float, metavar="S", help="DP.sync of a model chunk (default: 0)"
    )
    file = parser.add_argument_group("costs from a file")
    file.add_argument("--costs", type=Path, metavar="FILE", help="JSON, a key per kind of action")
    model = parser.add_argument_group("costs of a model on a cluster")
    add_hardware_flags(model, required=False, models=models, nodes=nodes)  # type: ignore[arg-type]
    model.add_argument("--tp", type=int, metavar="N", help="tensor-parallel size (default: 1)")
    model.add_argument(
        "--dp", type=int, metavar="N", help="data-parallel size (default: what is left)"
    )
    model.add_argument("--micro-batch-size", type=int, metavar="N", help="sequences (default: 1)")
    model.add_argument("--recompute", choices=("none", "selective", "full"), help="(default: none)")
    model.add_argument("--distributed-optimizer", action="store_true", default=None)
    model.add_argument(
        "--use-tp-pp-dp-mapping",
        action="store_true",
        default=None,
        help="pipeline ranks are neighbours, where replicas are otherwise: Megatron's flag",
    )
    model.add_argument("--fp32", action="store_true", default=None, help="instead of 16 bits")
    model.add_argument(
        "--grad-reduce-in-bf16",
        action="store_true",
        default=None,
        help="gradients of 16 bits, where they have 32 otherwise: Megatron's flag",
    )


def given_costs(args: Namespace) -> str | None:
    """Return the first option for costs that is given, or None."""
    names = (*SECONDS, *FILE, *MODEL)
    return next((spelled_flag(name) for name in names if getattr(args, name) is not None), None)


def spelled_flag(name: str) -> str:
    """Return an option as a user types it."""
    return "--" + name.replace("_", "-")

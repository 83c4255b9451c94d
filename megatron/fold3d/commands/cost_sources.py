"""Where the costs of a prediction come from: a model on a cluster, a file, or numbers."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace, _ActionsContainer
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import inf, isfinite
from pathlib import Path

from megatron.fold3d.config.spelling import flag_of
from megatron.fold3d.observe.fields import from_file
from megatron.fold3d.observe.memory_curve import Footprint
from megatron.fold3d.predict.cost_model.cluster import NODES, Cluster, cluster
from megatron.fold3d.predict.cost_model.estimate import Estimate
from megatron.fold3d.predict.cost_model.model_shape import SHAPES, ModelShape
from megatron.fold3d.predict.search.candidates import Candidate, estimate_of
from megatron.fold3d.predict.simulator.costs import Costs

CostsOf = Callable[[Candidate], Estimate]
"""Returns the costs and the memory of a candidate."""

_MEASURED = {
    "task_overhead_s": "what starting a forward or backward of one model chunk costs",
    "iteration_overhead_s": "what an iteration costs beside computation and network",
    "straggler_sigma": "standard deviation of GPUs' times for the same computation, as a part of "
    "their mean",
}
_SECONDS = {
    "forward": "forward_s",
    "backward": "backward_s",
    "recompute": "recompute_s",
    "tp": "tp_sync_s",
    "p2p": "p2p_s",
    "sum": "grad_sync_s",
}


def add_number_options(parser: _ActionsContainer) -> None:
    """Add ``--seconds`` and ``--costs``."""
    parser.add_argument(
        "--seconds",
        type=_seconds,
        action="extend",
        metavar="KIND=S,...",
        help="costs of one micro-batch in one model chunk: forward (default: 1), backward (2), of "
        "these recompute and tp, tensor-parallel collectives; p2p, a transfer; sum, DP.sync of a "
        "chunk as an all-reduce",
    )
    parser.add_argument("--costs", type=Path, help="JSON, a key per kind of action")


def add_cluster_options(parser: ArgumentParser, sources: _ActionsContainer | None = None) -> None:
    """Add ``--cluster``, required without other sources, and options for measured values."""
    (sources or parser).add_argument(
        "--cluster",
        required=sources is None,
        metavar="NAME",
        help="<node>x<GPUs>[-<Gb/s per node>g] such as a100x128-200g, with a node of "
        f"{', '.join(NODES)}; or a .json or .toml file with the fields of a cluster. --model is "
        f"one of {', '.join(SHAPES)}; or layers-hidden-heads[-sequence] such as 24-2048-16; or a "
        "file with the fields of a model's shape",
    )
    group = parser.add_argument_group("with --cluster, what was measured of it")
    group.add_argument(
        "--layer-forward-s",
        type=float,
        metavar="S",
        help="one layer's forward of one sequence on one GPU (default: its FLOPs at the rate and "
        "the efficiency of the cluster's GPUs)",
    )
    for name, what in _MEASURED.items():
        group.add_argument(flag_of(name), type=float, metavar="X", help=what)


def named_cluster(args: Namespace, shape: ModelShape) -> Cluster:
    """Return the cluster of a command, with what was measured of a model on it.

    Raises:
        ValueError: no cluster has this name, or a number is impossible.
    """
    found = cluster(args.cluster)
    if (layer_s := args.layer_forward_s) is not None:
        if not 0 < layer_s < inf:
            raise ValueError(f"--layer-forward-s {layer_s}: give seconds above zero")
        flops_per_s = shape.layer_flops(0) / layer_s / found.compute_efficiency
        found = replace(
            found, gpu_flops_per_s=flops_per_s, memory_bytes_per_s=0.0, layer_efficiencies=()
        )
    given = ((name, getattr(args, name)) for name in _MEASURED)
    return replace(found, **{name: value for name, value in given if value is not None})


def on_cluster(shape: ModelShape, hardware: Cluster) -> CostsOf:
    """Return the costs and the memory of a model's candidates on a cluster."""
    return cache(lambda candidate: estimate_of(shape, hardware, candidate))


def on_queues(costs: CostsOf, connections: int | None, launches: int | None = None) -> CostsOf:
    """Return costs on GPUs whose streams share hardware queues.

    Args:
        connections: the value of CUDA_DEVICE_MAX_CONNECTIONS; None is a queue for each stream.
        launches: collectives of each stage's DP.sync; by default as many as in training.
    """

    def known(candidate: Candidate) -> Estimate:
        stages = candidate.num_ranks * candidate.num_segments
        each = () if launches is None else (launches,) * stages
        return replace(costs(candidate), cuda_connections=connections, launches=each)

    return known


def in_numbers(args: Namespace) -> CostsOf:
    """Return the costs from ``--costs`` or ``--seconds``, neither of which knows memory.

    Raises:
        ValueError: as `costs_from`.
    """

    @cache
    def known(candidate: Candidate) -> Estimate:
        ranks, stages = candidate.num_ranks, candidate.num_ranks * candidate.num_segments
        if args.costs is not None:
            costs = costs_from(args.costs, stages)
        else:
            costs = Costs.uniform(stages, **dict(args.seconds or ()))
            if candidate.job.steps_shards:
                costs = costs.in_shards(candidate.job.parameter_share)
        costs = costs.with_replicated(candidate.choice.stages(ranks, optimizer="replicated"))
        nothing = Footprint(static_bytes=(0.0,) * ranks, saved_bytes=(0.0,) * stages)
        return Estimate(costs, nothing, tuple(range(ranks)))

    return known


def costs_from(path: Path, num_stages: int) -> Costs:
    """Return the costs of a plan's stages from a file.

    Raises:
        ValueError: the file holds no such costs, or cannot be read; the message has its path.
    """
    costs = from_file(path, Costs, "cost table")
    try:
        costs.check(num_stages)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return costs


def _seconds(text: str) -> list[tuple[str, float]]:
    """Read ``forward=1,sum=6`` as keywords of `Costs.uniform`."""
    found = []
    for word in text.split(","):
        kind, _, number = word.partition("=")
        if kind not in _SECONDS:
            raise ArgumentTypeError(f"{word!r}: give some of {', '.join(_SECONDS)}, as forward=1")
        try:
            seconds = float(number)
        except ValueError:
            seconds = -1.0
        if not (isfinite(seconds) and seconds >= 0):
            raise ArgumentTypeError(f"{word!r}: seconds are zero or more")
        found.append((_SECONDS[kind], seconds))
    return found

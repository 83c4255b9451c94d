"""Where the costs of a simulation come from: numbers, a file, or a model on a cluster."""

from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import get_args

from megatron.fold3d.commands.hardware_options import add_hardware_options, named_hardware
from megatron.fold3d.observe.fields import read_text
from megatron.fold3d.observe.memory_curve import Footprint, memory
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.estimate import estimate
from megatron.fold3d.predict.cost_model.launches import launches
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.sizes import Recompute, Setup
from megatron.fold3d.predict.search.planner import USABLE_MEMORY
from megatron.fold3d.predict.simulator.costs import Costs

_SECONDS = ("forward_s", "backward_s", "recompute_s", "p2p_s", "grad_sync_s")
_FILE = ("costs",)
_MODEL = (
    *("model", "cluster", "tp", "dp", "micro_batch_size", "recompute"),
    *("distributed_optimizer", "fp32", "layer_forward_s", "task_overhead_s"),
    "iteration_overhead_s",
)


def add_cost_options(parser: ArgumentParser) -> None:
    """Add the options of all three sources; at most one source is given."""
    units = parser.add_argument_group("costs in numbers", "of one micro-batch in one model chunk")
    units.add_argument("--forward-s", type=float, metavar="S", help="(default: 1)")
    units.add_argument("--backward-s", type=float, metavar="S", help="(default: 2)")
    units.add_argument(
        "--recompute-s",
        type=float,
        metavar="S",
        help="of --backward-s, what a recomputation takes (default: 0)",
    )
    units.add_argument("--p2p-s", type=float, metavar="S", help="one transfer (default: 0)")
    units.add_argument(
        "--grad-sync-s", type=float, metavar="S", help="DP.sync of a model chunk (default: 0)"
    )
    file = parser.add_argument_group("costs from a file")
    file.add_argument("--costs", type=Path, metavar="FILE", help="JSON, a key per kind of action")
    model = parser.add_argument_group("costs of a model on a cluster")
    add_hardware_options(model, required=False)  # type: ignore[arg-type]
    model.add_argument("--tp", type=int, metavar="N", help="tensor-parallel size (default: 1)")
    model.add_argument(
        "--dp", type=int, metavar="N", help="data-parallel size (default: what is left)"
    )
    model.add_argument("--micro-batch-size", type=int, metavar="N", help="sequences (default: 1)")
    model.add_argument("--recompute", choices=get_args(Recompute), help="(default: none)")
    model.add_argument("--distributed-optimizer", action="store_true", default=None)
    model.add_argument("--fp32", action="store_true", default=None, help="instead of 16 bits")


@dataclass(frozen=True, slots=True)
class Hardware:
    """What is known beside the costs when these come from a model on a cluster."""

    shape: ModelShape
    cluster: Cluster
    setup: Setup
    footprint: Footprint

    @property
    def usable_bytes(self) -> float:
        """What a run may hold of a GPU's memory: the planner's share of it."""
        return self.cluster.gpu_memory_bytes * USABLE_MEMORY

    def peaks(self, timeline: Timeline) -> list[float]:
        """Return the most bytes that each rank's GPU holds."""
        return _peaks(timeline, self.footprint)

    def nearest_fit(self, timeline: Timeline) -> str:
        """Return what would make a run fit that exceeds the GPUs' memory."""
        ranks, stages = timeline.num_ranks, timeline.num_ranks * timeline.num_segments
        for recompute in ("selective", "full"):
            setup = replace(self.setup, recompute=recompute)
            known = estimate(
                self.shape,
                self.cluster,
                setup,
                num_ranks=ranks,
                num_segments=stages // ranks,
            )
            if max(_peaks(timeline, known.footprint)) <= self.usable_bytes:
                return f"--recompute {recompute} fits"
        return "no --recompute makes it fit; `fold3d search` finds the splits that do"


@dataclass(frozen=True, slots=True)
class Source:
    """Costs, and the hardware that they are of, if any."""

    costs: Costs
    nic_of_rank: tuple[int, ...] | None = None
    hardware: Hardware | None = None
    gradient_bytes: tuple[float, ...] = ()
    """Of each stage, where a model has any."""

    def launches(self, *, deferred: bool) -> tuple[int, ...]:
        """Return the collectives that each stage's DP.sync is launched as; one without a model."""
        if self.hardware is None:
            return ()
        return launches(self.gradient_bytes, self.hardware.setup, deferred=deferred)

    @property
    def gathers_params(self) -> bool:
        """Whether the distributed optimizer's parameters are gathered in each iteration."""
        return self.hardware is not None and self.hardware.setup.distributed_optimizer


def costs_of(args: Namespace, plan: Plan) -> Source:
    """Return the costs that the options stand for.

    Raises:
        ValueError: two sources are mixed, or the one given does not fit the plan.
        OSError: the file cannot be read.
    """
    given = [
        [name for name in names if getattr(args, name) is not None]
        for names in (_SECONDS, _FILE, _MODEL)
    ]
    first, *others = [names[0] for names in given if names] or ["forward_s"]
    if others:
        raise ValueError(
            f"{_flag(first)} with {_flag(others[0])}: costs have one source, numbers, a file or a "
            "model on a cluster; drop one"
        )
    if first in _FILE:
        return Source(costs_from(args.costs, plan))
    if first in _MODEL:
        return _from_model(args, plan)
    numbers = {name: getattr(args, name) for name in given[0]}
    for name, seconds in numbers.items():
        if not (isfinite(seconds) and seconds >= 0):
            raise ValueError(f"{_flag(name)} {seconds}: seconds are zero or more")
    return Source(Costs.uniform(plan.num_stages, **numbers))


def costs_from(path: Path, plan: Plan) -> Costs:
    """Return the costs in a file, those of a plan's stages.

    Raises:
        ValueError: the file holds no such costs; the message begins with the path.
        OSError: it cannot be read.
    """
    text = read_text(path)
    try:
        costs = Costs.from_json(text)
        costs.check(plan)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return costs


def _from_model(args: Namespace, plan: Plan) -> Source:
    lacking = [_flag(name) for name in ("model", "cluster") if getattr(args, name) is None]
    if lacking:
        given = next(name for name in _MODEL if getattr(args, name) is not None)
        raise ValueError(
            f"{_flag(given)} without {' and '.join(lacking)}: it is for the costs of a model on a "
            f"cluster; give {' and '.join(lacking)}"
        )
    shape, cluster = named_hardware(args)
    tp = 1 if args.tp is None else args.tp
    setup = Setup(
        tensor_parallel=tp,
        data_parallel=_data_parallel(args.dp, tp, plan.num_ranks, cluster),
        microbatch_size=1 if args.micro_batch_size is None else args.micro_batch_size,
        sequence_parallel=tp > 1,
        distributed_optimizer=bool(args.distributed_optimizer),
        recompute=args.recompute or "none",
        fp32=bool(args.fp32),
    )
    if shape.num_layers % plan.num_stages:
        raise ValueError(_uneven(shape, plan))
    known = estimate(
        shape, cluster, setup, num_ranks=plan.num_ranks, num_segments=plan.num_segments
    )
    hardware = Hardware(shape, cluster, setup, known.footprint)
    return Source(known.costs, known.nic_of_rank, hardware, known.gradient_bytes)


def _uneven(shape: ModelShape, plan: Plan) -> str:
    layers, ranks, segments = shape.num_layers, plan.num_ranks, plan.num_segments
    fit = [n for n in range(1, layers + 1) if layers % (ranks * n) == 0]
    nearest = min(fit, key=lambda n: abs(n - segments), default=None)
    fix = f"--segments {nearest}" if nearest else f"a --pp that divides {layers}"
    return (
        f"the {layers} layers of {shape.name} are not divisible by pp {ranks} x segments "
        f"{segments}; try {fix}"
    )


def _data_parallel(dp: int | None, tp: int, pp: int, cluster: Cluster) -> int:
    gpus = cluster.num_gpus
    if tp < 1:
        raise ValueError(f"--tp {tp}: a size is at least one")
    left, rest = divmod(gpus, tp * pp)
    if dp in (None, left) and left and not rest:
        return left
    found = f"--tp {tp} x pp {pp}" + (f" x --dp {dp}" if dp is not None else "")
    if left and not rest:
        fix = f"try --dp {left}"
    else:
        near = max((n for n in range(1, gpus + 1) if gpus % (n * pp) == 0 and n <= tp), default=0)
        fix = f"try --tp {near}" if near else f"give a --pp that divides {gpus}"
    raise ValueError(f"{found} does not use the {gpus} GPUs of {cluster.name}; {fix}")


def _peaks(timeline: Timeline, footprint: Footprint) -> list[float]:
    return [rank.device.peak_bytes for rank in memory(timeline, footprint)]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")

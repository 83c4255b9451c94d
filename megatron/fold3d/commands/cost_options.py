"""Where the costs of a simulation come from: numbers, a file, or a model on a cluster."""

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

from megatron.fold3d.commands.cost_flags import (
    FILE,
    MODEL,
    SECONDS,
    add_cost_flags,
    spelled_flag,
)
from megatron.fold3d.commands.hardware_options import MODELS, NODE_NAMES, named_hardware
from megatron.fold3d.observe.breakdown import Flops
from megatron.fold3d.observe.fields import read_text
from megatron.fold3d.observe.memory_curve import Footprint, memory
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.passes.place_weight_grads import HeldSizes
from megatron.fold3d.policy.shard_order import started_shares
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.estimate import estimate
from megatron.fold3d.predict.cost_model.launches import launches
from megatron.fold3d.predict.cost_model.layers import layers_of_stages
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.cost_model.training_flops import training_flops
from megatron.fold3d.predict.search.order_choice import held_sizes
from megatron.fold3d.predict.search.planner import USABLE_MEMORY
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.routes import NO_SWITCHES, Routes


def add_cost_options(parser: ArgumentParser) -> None:
    """Add the options of all three sources; at most one source is given."""
    add_cost_flags(parser, models=MODELS, nodes=NODE_NAMES)


@dataclass(frozen=True, slots=True)
class Hardware:
    """The facts beside the costs when these come from a model on a cluster."""

    shape: ModelShape
    cluster: Cluster
    setup: Setup
    footprint: Footprint
    layers: tuple[int, ...]
    """Of each stage."""

    @property
    def usable_bytes(self) -> float:
        """The bytes of a GPU's memory that a run may hold: the planner's share of it."""
        return self.cluster.gpu_memory_bytes * USABLE_MEMORY

    @property
    def shard_shares(self) -> tuple[tuple[float, float], ...]:
        """How reductions to shards start between weight gradients, as in `Execution`."""
        return started_shares(min(self.layers), self.setup.num_replicas)

    def flops(self, period_s: float, num_microbatches: int, counts: Sequence[int] | None) -> Flops:
        """Return the FLOP/s of a GPU; ``counts`` layers of each stage are recomputed, if given."""
        each = training_flops(self.shape, self.setup.recompute, self.layers, counts or ())
        batch = self.setup.microbatch_size * self.setup.data_parallel * num_microbatches
        return each.times(batch / period_s / self.cluster.num_gpus)

    def peaks(self, timeline: Timeline) -> list[float]:
        """Return the most bytes that each rank's GPU holds."""
        return _peaks(timeline, self.footprint)

    def held_sizes(self, plan: Plan) -> HeldSizes:
        """Return the bytes that micro-batches hold, and the memory that ranks have for them."""
        return held_sizes(self.footprint, plan, self.usable_bytes)

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
                layers=self.layers,
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
    routes: Routes = NO_SWITCHES
    gradient_bytes: tuple[float, ...] = ()
    """Of each stage, where a model has any."""
    cuda_connections: int | None = None
    """Hardware queues that the streams of a GPU share in training; None is one for each."""

    def launches(self, *, deferred: bool, connections: int) -> tuple[int, ...]:
        """Return the collectives that each stage's DP.sync is launched as; one without a model."""
        if self.hardware is None:
            return ()
        setup = self.hardware.setup
        return launches(self.gradient_bytes, setup, deferred=deferred, connections=connections)

    @property
    def gathers_params(self) -> bool:
        """True if the distributed optimizer's parameters are gathered in each iteration."""
        return self.hardware is not None and self.hardware.setup.distributed_optimizer


def costs_of(args: Namespace, plan: Plan) -> Source:
    """Return the costs that the options stand for.

    Raises:
        ValueError: two sources are mixed, or the one given does not fit the plan.
        OSError: the file cannot be read.
    """
    given = [
        [name for name in names if getattr(args, name) is not None]
        for names in (SECONDS, FILE, MODEL)
    ]
    first, *others = [names[0] for names in given if names] or ["forward_s"]
    if others:
        raise ValueError(
            f"{spelled_flag(first)} with {spelled_flag(others[0])}: costs have one source, "
            "numbers, a file or a model on a cluster; drop one"
        )
    if first in FILE:
        return Source(costs_from(args.costs, plan))
    if first in MODEL:
        return _from_model(args, plan)
    numbers = {name: getattr(args, name) for name in given[0]}
    for name, seconds in numbers.items():
        if not (isfinite(seconds) and seconds >= 0):
            raise ValueError(f"{spelled_flag(name)} {seconds}: seconds are zero or more")
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
    lacking = [spelled_flag(name) for name in ("model", "cluster") if getattr(args, name) is None]
    if lacking:
        given = next(name for name in MODEL if getattr(args, name) is not None)
        raise ValueError(
            f"{spelled_flag(given)} without {' and '.join(lacking)}: it is for the costs of a "
            f"model on a cluster; give {' and '.join(lacking)}"
        )
    job = getattr(args, "job", None)  # `fold3d plan` takes no training flags
    shape, cluster = named_hardware(args, None if job is None else job.shape)
    tp = 1 if args.tp is None else args.tp
    setup = (
        job.setup
        if job is not None
        else Setup(
            tensor_parallel=tp,
            data_parallel=_data_parallel(args.dp, tp, plan.num_ranks, cluster),
            microbatch_size=1 if args.micro_batch_size is None else args.micro_batch_size,
            sequence_parallel=tp > 1,
            distributed_optimizer=bool(args.distributed_optimizer),
            recompute=args.recompute or "none",
            order="tp-pp-dp" if args.use_tp_pp_dp_mapping else "tp-dp-pp",
            fp32=bool(args.fp32),
            small_gradients=bool(args.grad_reduce_in_bf16),
        )
    )
    layers = _layers(args, shape, plan)
    known = estimate(
        shape,
        cluster,
        setup,
        num_ranks=plan.num_ranks,
        num_segments=plan.num_segments,
        layers=layers,
    )
    hardware = Hardware(shape, cluster, setup, known.footprint, layers)
    return Source(
        known.costs,
        known.nic_of_rank,
        hardware,
        known.routes,
        known.gradient_bytes,
        known.cuda_connections,
    )


def _layers(args: Namespace, shape: ModelShape, plan: Plan) -> tuple[int, ...]:
    """Return the layers of each stage: those given, or else as even as possible."""
    given = getattr(args, "layers", None)  # `fold3d plan` has no such option
    if isinstance(given, tuple):
        if len(given) != plan.num_stages or sum(given) != shape.num_layers:
            raise ValueError(
                f"--layers {','.join(map(str, given))}: a plan of {plan.num_stages} stages needs "
                f"as many numbers; together they are the {shape.num_layers} layers of "
                f"{shape.name}; give such"
            )
        return given
    if shape.num_layers % plan.num_stages and (given is None or shape.num_layers < plan.num_stages):
        raise ValueError(_uneven(shape, plan))
    return layers_of_stages(shape.num_layers, plan.num_ranks, plan.num_segments)


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

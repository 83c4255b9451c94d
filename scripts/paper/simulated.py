"""Simulate the systems by name on the paper's clusters, for its figures.

The planner's cost model, with the constants that `tables` fits to the 18B rows: a node's goodput
and one overhead per task. A model computes as fast as in its Megatron row; one without such a row
as the model of `_AS`. As in the paper, no stream waits for another to have its turn in a queue.
"""

from dataclasses import dataclass, replace
from functools import cache

from megatron.fold3d.observe.exposure import Exposure, exposure, mean
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.compile import Options, lower
from megatron.fold3d.predict.cost_model.cluster import Cluster, cluster
from megatron.fold3d.predict.cost_model.estimate import Estimate, estimate
from megatron.fold3d.predict.cost_model.layers import layers_of_stages
from megatron.fold3d.predict.cost_model.model_shape import SHAPES
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.candidate_timeline import order_of, timeline_of
from megatron.fold3d.predict.search.candidates import Candidate
from megatron.fold3d.predict.simulator.execution import Execution, sends_stock_waits_for
from megatron.fold3d.predict.simulator.simulate import simulate
from scripts.paper.published_rows import GRADIENT_BYTES, MICROBATCH_SIZE
from scripts.paper.systems import SYSTEMS, Layout
from scripts.paper.tables import published

PASSES = 4  # a forward, its recomputation, and a backward of twice the work
_CLUSTERS = {"a100": "A100x128", "v100": "V100x64"}  # as the tables name them
_MODELS = {"gpt3-18b": "GPT-3 18B", "gpt3-39b": "GPT-3 39B", "bert": "BERT", "cpm": "CPM"}
_AS = {"gpt3-81b": "gpt3-39b", "gpt3-14b": "gpt3-18b"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A job of the paper: a model on a cluster in one layout."""

    node: str
    model: str
    batch: int
    dp: int
    pp: int
    tp: int
    segments: int = 4
    gigabits: float | None = None
    """Of a node; None is the cluster's own."""

    @property
    def gpus(self) -> int:
        """GPUs of the whole job."""
        return self.dp * self.pp * self.tp

    @property
    def layout(self) -> Layout:
        """What the table of systems has to know."""
        return Layout(
            pipeline_ranks=self.pp,
            segments=self.segments,
            microbatches=self.batch // self.dp // MICROBATCH_SIZE,
            sequences=max(1, self.batch // self.gpus),
            fp16=self.node == "v100",
        )

    @property
    def hardware(self) -> Cluster:
        """The cluster, as the 18B rows calibrate it."""
        _, fit = published()
        name = _CLUSTERS[self.node]
        own = cluster(f"{self.node}x{self.gpus}")
        rate = own.nic_bytes_per_s if self.gigabits is None else self.gigabits / 8 * 1e9
        return replace(
            own,
            is_blackwell=True,
            nic_bytes_per_s=rate,
            nic_efficiency=fit.sync_bytes_per_s[name] / own.nic_bytes_per_s,
            task_overhead_s=fit.task_overhead_s,
            compute_efficiency=_efficiency(self.node, self.model),
        )


@cache
def iteration(point: Point, name: str) -> Exposure:
    """Return where the time of a system's iteration goes, in the mean of its ranks.

    Raises:
        ValueError: the system, or the model, cannot have this layout.
    """
    system = SYSTEMS[name]
    if not system.candidate:
        return _zero3(point)
    if name == "auto":
        return min(map(mean, map(exposure, _auto(point))), key=lambda found: found.total_s)
    return mean(exposure(_timeline(point, name)))


def tflops(point: Point, name: str) -> float:
    """Return a system's TFLOP/s per GPU, recomputation included, as the paper counts."""
    return _flops(point) / iteration(point, name).total_s / point.gpus / 1e12


def _flops(point: Point) -> float:
    return PASSES * point.batch * float(sum(SHAPES[point.model].stage_flops(1)))


def _auto(point: Point) -> list[Timeline]:
    """Return the orders among which a run with the distributed optimizer chooses."""
    return [_timeline(point, "megatron-best"), _timeline(point, "aiao", sharded=True)]


def _timeline(point: Point, name: str, *, sharded: bool = False) -> Timeline:
    system, layout = SYSTEMS[name], point.layout
    segments = system.segments(layout)
    fields = dict(system.candidate)
    breadth_first = fields.pop("breadth_first", False)
    layers = layers_of_stages(SHAPES[point.model].num_layers, point.pp, segments)
    candidate = Candidate(
        **fields,
        setup=_setup(point, sharded=sharded or breadth_first),
        num_ranks=point.pp,
        num_segments=segments,
        num_microbatches=layout.microbatches,
        group_size=layout.microbatches if breadth_first else None,
        layers=layers,
    )
    costs = _estimate(point, candidate, point.hardware)
    if not system.serial:
        return timeline_of(candidate, costs)
    plan = lower(order_of(candidate), Options(transfers=False, grad_sync="serial"))
    seconds = costs.costs
    if name == "dspeed3d":  # every tensor-parallel rank sends the whole tensor
        seconds = replace(seconds, p2p_s=seconds.p2p_s * point.tp)
    execution = Execution(
        nic_of_rank=costs.nic_of_rank,
        in_order=True,
        sends_waited_for=sends_stock_waits_for(segments),
    )
    return simulate(plan, seconds, execution)


def _setup(point: Point, *, sharded: bool = False) -> Setup:
    return Setup(
        tensor_parallel=point.tp,
        data_parallel=point.dp,
        microbatch_size=MICROBATCH_SIZE,
        sequence_parallel=point.tp > 1,
        recompute="full",
        small_gradients=True,
        distributed_optimizer=sharded,
    )


def _estimate(point: Point, candidate: Candidate, hardware: Cluster) -> Estimate:
    return estimate(
        SHAPES[point.model],
        hardware,
        candidate.setup,
        num_ranks=candidate.num_ranks,
        num_segments=candidate.num_segments,
        layers=candidate.layers,
    )


@cache
def _efficiency(node: str, model: str) -> float:
    """Return the part of a GPU's peak that computation achieves in a model's Megatron row."""
    tables, _ = published()
    wanted = _CLUSTERS[node], _MODELS.get(_AS.get(model, model), model)
    found = [
        row
        for row in tables.rows
        if (row["cluster"], row["model"]) == wanted and row["system"].startswith("Megatron")
    ]
    if not found:  # as much of 39B's as on the other cluster
        there = _efficiency("a100", model) / _efficiency("a100", "gpt3-39b")
        return _efficiency(node, "gpt3-39b") * there
    (row,) = found
    shape = SHAPES[_AS.get(model, model)]
    setup = Setup(tensor_parallel=row["tp"], data_parallel=row["dp"], sequence_parallel=True)
    setup = replace(setup, microbatch_size=MICROBATCH_SIZE, recompute="full")
    own = cluster(f"{node}x{row['dp'] * row['pp'] * row['tp']}")

    def computing_s(efficiency: float) -> float:
        hardware = replace(own, compute_efficiency=efficiency)
        costs = estimate(shape, hardware, setup, num_ranks=row["pp"], num_segments=1).costs
        return sum(costs.forward_s) + sum(costs.backward_s)

    at_peak_s = computing_s(1.0)
    flops_s = computing_s(0.5) - at_peak_s  # the rest of it is TP.sync
    microbatches = row["batch"] // row["dp"] // MICROBATCH_SIZE
    published_s = (row["fwd_ms"] + row["bwd_ms"]) / 1e3 * row["pp"] / microbatches
    return float(flops_s / (published_s - (at_peak_s - flops_s)))


def _zero3(point: Point) -> Exposure:
    """Return ZeRO-3's iteration: a gather of all parameters in forward and backward, or more."""
    _, fit = published()
    hardware = point.hardware
    faster = hardware.nic_bytes_per_s / cluster(f"{point.node}x{point.gpus}").nic_bytes_per_s
    nodes, name = hardware.num_nodes, _CLUSTERS[point.node]
    sent = GRADIENT_BYTES * SHAPES[point.model].num_parameters * (nodes - 1) / nodes
    gather_s = sent / (fit.gather_bytes_per_s[name] * faster)
    compute_s = _flops(point) / (
        point.gpus * hardware.gpu_flops_per_s * hardware.compute_efficiency
    )
    return Exposure(
        forward_s=max(gather_s, compute_s / PASSES),
        backward_s=max(gather_s, compute_s * (PASSES - 1) / PASSES),
        grad_sync_s=sent / (fit.sync_bytes_per_s[name] * faster),
    )

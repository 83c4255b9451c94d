"""Simulate the systems by name on the paper's clusters, for its figures.

The planner's cost model, with the constants that `tables` fits to the 18B rows: a node's goodput
and one overhead per task. A model computes as fast as in its Megatron row; one without such a row
as the model of `_AS`. As in the paper, no stream waits for another to have its turn in a queue.
"""

from dataclasses import replace
from functools import cache

from megatron.fold3d.observe.exposure import Exposure, exposure, mean
from megatron.fold3d.observe.memory_curve import memory
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job, lower
from megatron.fold3d.policy.partition import layers_of_stages
from megatron.fold3d.predict.cost_model.cluster import Cluster, cluster
from megatron.fold3d.predict.cost_model.estimate import estimate
from megatron.fold3d.predict.cost_model.model_shape import SHAPES
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.candidate_timeline import computed, timeline_of
from megatron.fold3d.predict.search.candidates import Candidate, estimate_of
from megatron.fold3d.predict.simulator.link import Link, sends_stock_waits_for
from megatron.fold3d.predict.simulator.simulate import simulate
from scripts.paper.points import PASSES, Iteration, Point, flops
from scripts.paper.published_rows import GRADIENT_BYTES, shape_name
from scripts.paper.row_sizes import STATE_BYTES
from scripts.paper.systems import SYSTEMS
from scripts.paper.tables import point_of, published

_CLUSTERS = {"a100": "A100x128", "v100": "V100x64"}  # as the tables name them
_AS = {"gpt3-81b": "gpt3-39b", "gpt3-14b": "gpt3-18b"}


@cache
def iteration(point: Point, name: str) -> Iteration:
    """Return a system's iteration of a point.

    Raises:
        ValueError: the system, or the model, cannot have this layout.
    """
    system = SYSTEMS[name]
    if not system.candidate:
        return Iteration(parts=_zero3(point))
    timelines = [_timeline(point, "megatron-best" if name == "auto" else name)]
    if name == "auto":  # a run with the distributed optimizer chooses between two orders
        timelines.append(_timeline(point, "aiao", sharded=True))
    return min(
        (Iteration(parts=mean(exposure(timeline))) for timeline in timelines),
        key=lambda found: found.total_s,
    )


def _hardware(point: Point) -> Cluster:
    """Return the cluster, as the 18B rows calibrate it."""
    _, fit = published()
    name = _CLUSTERS[point.node]
    own = cluster(f"{point.node}x{point.gpus}")
    rate = own.nic_bytes_per_s if point.gigabits is None else point.gigabits / 8 * 1e9
    return replace(
        own,
        is_blackwell=True,
        nic_bytes_per_s=rate,
        nic_efficiency=fit.sync_bytes_per_s[name] / own.nic_bytes_per_s,
        task_overhead_s=fit.task_overhead_s,
        compute_efficiency=_efficiency(point.node, point.model),
        memory_bytes_per_s=0.0,
    )


@cache
def usable_share(point: Point, name: str) -> float:
    """Return a system's peak of a GPU's memory, as part of what a run can use of it."""
    hardware = cluster(f"{point.node}x{point.gpus}")
    usable_bytes = hardware.usable_bytes
    if not SYSTEMS[name].candidate:  # all states are in shards
        return STATE_BYTES * SHAPES[point.model].num_parameters / point.gpus / usable_bytes
    sharded = name in ("auto", "dspeed3d")
    candidate = _candidate(point, "aiao" if name == "auto" else name, sharded=sharded)
    if point.node == "v100":  # as scripts/slurm/v100.sbatch has it
        setup = replace(candidate.setup, sequence_parallel=False, local_layers=True)
        candidate = replace(candidate, setup=setup)
    costs = estimate_of(SHAPES[point.model], hardware, candidate)
    peaks = memory(timeline_of(candidate, costs), costs.footprint)
    return max(rank.device_peak for rank in peaks) / usable_bytes


def _candidate(point: Point, name: str, *, sharded: bool = False) -> Candidate:
    system, layout = SYSTEMS[name], point.layout
    segments = system.segments(layout)
    fields = dict(system.candidate)
    breadth_first = fields.pop("breadth_first", False)
    choice = Choice.parse(fields.pop("word"), segments)
    layers = layers_of_stages(SHAPES[point.model].num_layers, point.pp, segments)
    return Candidate(
        **fields,
        choice=replace(choice, group=layout.microbatches if breadth_first else None),
        setup=_setup(point, sharded=sharded or breadth_first),
        num_ranks=point.pp,
        num_microbatches=layout.microbatches,
        layers=layers,
    )


def _timeline(point: Point, name: str, *, sharded: bool = False) -> Timeline:
    system = SYSTEMS[name]
    candidate = _candidate(point, name, sharded=sharded)
    costs = estimate_of(SHAPES[point.model], _hardware(point), candidate)
    if not system.serial:
        return timeline_of(candidate, costs)
    plan = lower(Job.of(computed(candidate), grad_sync="serial"), transfers=False)
    seconds = costs.costs
    if name == "dspeed3d":  # every tensor-parallel rank sends the whole tensor
        seconds = replace(seconds, p2p_s=seconds.p2p_s * point.tp)
    link = Link(
        nic_of_rank=costs.nic_of_rank,
        sends_waited_for=sends_stock_waits_for(candidate.num_segments),
    )
    return simulate(plan, seconds, link)


def _setup(point: Point, *, sharded: bool = False) -> Setup:
    return Setup(
        tensor_parallel=point.tp,
        data_parallel=point.dp,
        microbatch_size=point.microbatch_size,
        sequence_parallel=point.tp > 1,
        recompute="full",
        small_gradients=True,
        distributed_optimizer=sharded,
    )


@cache
def _efficiency(node: str, model: str) -> float:
    """Return the part of a GPU's peak that computation achieves in a model's Megatron row."""
    tables, _ = published()
    wanted = _CLUSTERS[node], _AS.get(model, model)
    of_megatron = [row for row in tables.rows if row["system"].startswith("Megatron")]
    found = {(row["cluster"], shape_name(row["model"])): row for row in of_megatron}
    if not (row := found.get(wanted)):  # as much of 39B's as on the other cluster
        there = _efficiency("a100", model) / _efficiency("a100", "gpt3-39b")
        return _efficiency(node, "gpt3-39b") * there
    point = point_of(row)
    assert point is not None  # only T5 has none
    shape, own = SHAPES[point.model], cluster(f"{node}x{point.gpus}")
    setup = replace(_setup(point), small_gradients=False)

    def computing_s(efficiency: float) -> float:
        hardware = replace(own, compute_efficiency=efficiency, memory_bytes_per_s=0.0)
        costs = estimate(shape, hardware, setup, num_ranks=point.pp, num_segments=1).costs
        return sum(costs.forward_s) + sum(costs.backward_s)

    at_peak_s = computing_s(1.0)
    flops_s = computing_s(0.5) - at_peak_s  # the rest of it is TP.sync
    published_s = (row["fwd_ms"] + row["bwd_ms"]) / 1e3 * point.pp / point.layout.microbatches
    return float(flops_s / (published_s - (at_peak_s - flops_s)))


def _zero3(point: Point) -> Exposure:
    """Return ZeRO-3's iteration: a gather of all parameters in forward and backward, or more."""
    _, fit = published()
    hardware = _hardware(point)
    faster = hardware.nic_bytes_per_s / cluster(f"{point.node}x{point.gpus}").nic_bytes_per_s
    nodes, name = hardware.num_nodes, _CLUSTERS[point.node]
    sent = GRADIENT_BYTES * SHAPES[point.model].num_parameters * (nodes - 1) / nodes
    gather_s = sent / (fit.gather_bytes_per_s[name] * faster)
    compute_s = flops(point) / (point.gpus * hardware.gpu_flops_per_s * hardware.compute_efficiency)
    return Exposure(
        forward_s=max(gather_s, compute_s / PASSES),
        backward_s=max(gather_s, compute_s * (PASSES - 1) / PASSES),
        grad_sync_s=sent / (fit.sync_bytes_per_s[name] * faster),
    )

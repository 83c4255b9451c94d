"""Predict the rows of the paper's Tables II and III from shapes and a handful of constants.

A row's computation is that of the Megatron row of its cluster and model, spread over the stages by
their FLOPs. These are fitted, on the calibration rows alone:

- per cluster, the bandwidth that DP.sync gets out of a node, from the DP.sync column;
- per cluster, the bandwidth at which ZeRO-3 gathers its parameters;
- one overhead per task of a model chunk, from the iterations.

Everything else follows from the shapes. `row_sizes` has the columns of memory and throughput.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.fold3d.observe.exposure import exposure, mean
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job, lower
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.predict.cost_model.sizes import Setup, message_bytes
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link
from megatron.fold3d.predict.simulator.simulate import simulate
from scripts.paper.perf_model import grad_sync_s
from scripts.paper.published_rows import GRADIENT_BYTES, MICROBATCH_SIZE, Row, Tables, published_ms

MEGATRON_SEGMENTS = 2  # explains the published bubble of each Megatron row
ITERATIONS = 4  # until a schedule that defers DP.sync is steady


@dataclass(frozen=True, slots=True)
class Fit:
    """The fitted constants, and nothing else."""

    sync_bytes_per_s: dict[str, float]
    gather_bytes_per_s: dict[str, float]
    task_overhead_s: float


def predict(tables: Tables, row: Row, fit: Fit) -> dict[str, float]:
    """Return the row's columns in milliseconds."""
    return (_predict_pipeline if row.get("pp") else _predict_zero3)(tables, row, fit)


def _predict_pipeline(tables: Tables, row: Row, fit: Fit) -> dict[str, float]:
    shape, measured = tables.shapes[row["model"]], tables.measured(row)
    segments = segments_of(row)
    microbatches = row["batch"] // row["dp"] // MICROBATCH_SIZE
    sizes = {"num_ranks": row["pp"], "num_segments": segments, "num_microbatches": microbatches}
    bytes_per_s = fit.sync_bytes_per_s[row["cluster"]]

    # Megatron sends each element once and gathers in the node, DeepSpeed from every TP rank.
    copies = row["tp"] if row["system"].startswith("DSpeed") else 1
    sent = message_bytes(shape, Setup(microbatch_size=MICROBATCH_SIZE))
    p2p_s = sent * copies * tables.replicas_per_node(row) / bytes_per_s
    folds = row["system"] == "Fold3D"
    blocked_s = 0.0 if folds else p2p_s  # the baselines' ranks stand still for their transfers

    flops = shape.stage_flops(tables.layers(row, segments))
    share = [f * row["pp"] / sum(flops) / microbatches for f in flops]
    extra_s = fit.task_overhead_s + blocked_s
    nodes = tables.nodes_per_group(row)
    costs = Costs(
        forward_s=tuple(measured["fwd_ms"] / 1e3 * part + extra_s for part in share),
        backward_s=tuple(measured["bwd_ms"] / 1e3 * part + extra_s for part in share),
        p2p_s=p2p_s - blocked_s,
        grad_sync_s=tuple(
            grad_sync_s(w, nodes, bytes_per_s) for w in tables.stage_gradient_bytes(row, segments)
        ),
    )
    if folds:
        order = build("afab", **sizes)
        choice = Choice.plain("aiao", order.num_segments).changed(step="next")
        plan = lower(Job.of(order, choice), transfers=False)
        timeline = simulate(plan, costs, Link(grad_sync_order="edf"), iterations=ITERATIONS)
    else:
        order = build("interleaved" if segments > 1 else "1f1b", **sizes)
        plan = lower(Job.of(order, grad_sync="serial"), transfers=False)
        timeline = simulate(plan, costs)
    exposed = mean(exposure(timeline))
    columns = {
        "fwd_ms": measured["fwd_ms"],
        "bwd_ms": measured["bwd_ms"],
        "bubble_ms": exposed.bubble_s * 1e3,
        "dpsync_ms": exposed.grad_sync_s * 1e3,
    }
    return {**columns, "ppsync_ms": timeline.period_s * 1e3 - sum(columns.values())}


def segments_of(row: Row) -> int:
    """Return a row's model chunks per rank."""
    return row.get("ns") or (MEGATRON_SEGMENTS if row["system"].startswith("Megatron") else 1)


def _predict_zero3(tables: Tables, row: Row, fit: Fit) -> dict[str, float]:
    """Predict ZeRO-3: gathering parameters outlasts the computation of forward and of backward."""
    shape, nodes = tables.shapes[row["model"]], row["dp"] // tables.gpus_per_node[row["cluster"]]
    node_bytes = GRADIENT_BYTES * shape.num_parameters * (nodes - 1) / nodes
    gather_ms = node_bytes / fit.gather_bytes_per_s[row["cluster"]] * 1e3
    scatter_ms = node_bytes / fit.sync_bytes_per_s[row["cluster"]] * 1e3
    return {"fwd_ms": gather_ms, "bwd_ms": gather_ms, "dpsync_ms": scatter_ms}


def calibrate(tables: Tables, rows: Sequence[Row]) -> Fit:
    """Fit the constants on the calibration rows."""
    sync: dict[str, float] = {}
    gather: dict[str, float] = {}
    for cluster in sorted({row["cluster"] for row in tables.rows}):
        here = [row for row in rows if row["cluster"] == cluster]
        serial = [row for row in here if row.get("pp") and row["system"] != "Fold3D"]
        if not serial:
            raise ValueError(f"no calibration row of {cluster} exposes all of its DP.sync")
        volumes = [
            grad_sync_s(max(tables.stage_gradient_bytes(row, 1)), tables.nodes_per_group(row), 1.0)
            for row in serial
        ]
        sync[cluster] = sum(volumes) / sum(row["dpsync_ms"] / 1e3 for row in serial)
        if zero := [row for row in here if not row.get("pp")]:
            unit = Fit(sync, {cluster: 1.0}, 0.0)
            gathered = sum(2 * _predict_zero3(tables, row, unit)["fwd_ms"] for row in zero)
            gather[cluster] = gathered / sum(row["fwd_ms"] + row["bwd_ms"] for row in zero)
        else:
            gather[cluster] = sync[cluster]

    pipelines = [row for row in rows if row.get("pp")]

    def loss(overhead_s: float) -> float:
        fit = Fit(sync, gather, overhead_s)
        return sum(error(row, predict(tables, row, fit)) ** 2 for row in pipelines)

    return Fit(sync, gather, _minimum(loss, 0.0, 0.02))


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimum of a unimodal function, by ternary search."""
    while high - low > 1e-5:
        third = (high - low) / 3
        if function(low + third) < function(high - third):
            high -= third
        else:
            low += third
    return (low + high) / 2


def error(row: Row, predicted: dict[str, float]) -> float:
    """Return the relative error of an iteration."""
    return sum(predicted.values()) / published_ms(row) - 1

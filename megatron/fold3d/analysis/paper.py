"""Predict the rows of the paper's Tables II and III from shapes and a handful of constants.

A row's computation is that of the Megatron row of its cluster and model, spread over the stages by
their FLOPs. Fitted, on the calibration rows alone: per cluster the bandwidth that DP.sync gets out
of a node (on the DP.sync column) and the one at which ZeRO-3 gathers its parameters, and one
overhead per task of a model chunk (on the iterations). Everything else follows from the shapes.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.fold3d.analysis.cluster import NODES
from megatron.fold3d.analysis.costs import Costs
from megatron.fold3d.analysis.execution import Execution
from megatron.fold3d.analysis.exposure import exposure, mean
from megatron.fold3d.analysis.fields import is_number
from megatron.fold3d.analysis.grad_sync import deferred_grad_sync, serial_grad_sync
from megatron.fold3d.analysis.layers import layers_of_stages
from megatron.fold3d.analysis.model import SHAPES, ModelShape
from megatron.fold3d.analysis.perf_model import grad_sync_s
from megatron.fold3d.analysis.simulate import simulate
from megatron.fold3d.analysis.transformer import p2p_bytes
from megatron.fold3d.plan.schedules import build

MICROBATCH_SIZE = 4  # "without further specifications", Sec. VI
MEGATRON_SEGMENTS = 2  # explains the published bubble of each Megatron row
GRADIENT_BYTES = 2
COLUMNS = ("fwd_ms", "bwd_ms", "bubble_ms", "dpsync_ms", "ppsync_ms")
ITERATIONS = 4  # of a schedule that defers DP.sync, until it is steady

_MISPRINT = 0.01  # Util. and Thrp. of a row agree to this, or one of them is wrong

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fit:
    """What is fitted, and nothing else."""

    sync_bytes_per_s: dict[str, float]
    gather_bytes_per_s: dict[str, float]
    task_overhead_s: float


@dataclass(frozen=True, slots=True)
class Tables:
    """The rows of a file and what they refer to."""

    rows: tuple[Row, ...]
    shapes: dict[str, ModelShape]
    gpus_per_node: dict[str, int]
    peak_tflops: dict[str, float]
    flags: tuple[str, ...]
    """What the file itself says is wrong in the paper."""

    @classmethod
    def read(cls, path: Path) -> "Tables":
        """Read a file of the format of ``fold3d_tables.json``.

        Raises:
            ValueError: it has no rows, or one lacks what a prediction needs.
        """
        found = json.loads(path.read_text())
        tables = ("table_II", "table_III")
        if not isinstance(found, dict) or not any(map(found.get, tables)):
            raise ValueError(f"no rows; they are under {' and '.join(tables)}")
        rows = tuple(_row(row) for table in tables for row in found.get(table, ()))
        sizes = {row["model"]: row for row in found.get("table_I", ())}
        nodes = {row["cluster"]: NODES[_node(row["cluster"])] for row in rows}
        return cls(
            rows=rows,
            shapes={row["model"]: _shape(row["model"], sizes) for row in rows},
            gpus_per_node={name: node.gpus_per_node for name, node in nodes.items()},
            peak_tflops={name: node.gpu_flops_per_s / 1e12 for name, node in nodes.items()},
            flags=tuple(found.get("flags", ())),
        )

    def misprints(self, row: Row) -> list[str]:
        """Return where a row contradicts itself."""
        if not row.get("thrp_tflops") or not row.get("util_pct"):
            return []
        percent = row["thrp_tflops"] / self.peak_tflops[row["cluster"]] * 100
        if abs(percent / row["util_pct"] - 1) <= _MISPRINT:
            return []
        return [f"Thrp. {row['thrp_tflops']} is {percent:.1f}% of peak, Util. {row['util_pct']}%"]

    def measured(self, row: Row) -> Row:
        """Return the row that has the computation: Megatron's of the same cluster and model."""
        same = [r for r in self.rows if all(r[k] == row[k] for k in ("cluster", "model"))]
        return next((r for r in same if r["system"].startswith("Megatron")), row)

    def replicas_per_node(self, row: Row) -> int:
        """Return how many data-parallel replicas of a stage a node holds."""
        tensor_parallel: int = row["tp"]
        return max(1, self.gpus_per_node[row["cluster"]] // tensor_parallel)

    def layers(self, row: Row, num_segments: int) -> tuple[int, ...]:
        """Return the layers of each stage: 72 of BERT have no equal share in 16 stages."""
        return layers_of_stages(self.shapes[row["model"]].num_layers, row["pp"], num_segments)

    def stage_gradient_bytes(self, row: Row, num_segments: int) -> list[float]:
        """Return w of Sec. III-C for each stage: the gradients of all GPUs of a node."""
        parameters = self.shapes[row["model"]].stage_parameters(self.layers(row, num_segments))
        return [p * GRADIENT_BYTES * self.replicas_per_node(row) for p in parameters]

    def nodes_per_group(self, row: Row) -> int:
        """Return d_inter of Sec. III-C."""
        return int(row["dp"] // self.replicas_per_node(row))


def predict(tables: Tables, row: Row, fit: Fit) -> dict[str, float]:
    """Return the row's columns in milliseconds."""
    return (_predict_pipeline if row.get("pp") else _predict_zero3)(tables, row, fit)


def _predict_pipeline(tables: Tables, row: Row, fit: Fit) -> dict[str, float]:
    shape, measured = tables.shapes[row["model"]], tables.measured(row)
    segments = row.get("ns") or (MEGATRON_SEGMENTS if row["system"].startswith("Megatron") else 1)
    microbatches = row["batch"] // row["dp"] // MICROBATCH_SIZE
    sizes = {
        "num_ranks": row["pp"],
        "num_segments": segments,
        "num_microbatches": microbatches,
    }
    bytes_per_s = fit.sync_bytes_per_s[row["cluster"]]

    # Megatron sends each element once and gathers in the node, DeepSpeed from every TP rank.
    copies = row["tp"] if row["system"].startswith("DSpeed") else 1
    sent = p2p_bytes(MICROBATCH_SIZE, shape.seq_length, shape.hidden_size)
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
        plan = deferred_grad_sync(build("aiao", last_segment="afab", **sizes))
        timeline = simulate(plan, costs, Execution(grad_sync_order="edf"), iterations=ITERATIONS)
    else:
        plan = serial_grad_sync(build("interleaved" if segments > 1 else "1f1b", **sizes))
        timeline = simulate(plan, costs, Execution(flush=True))
    exposed = mean(exposure(timeline))
    columns = {
        "fwd_ms": measured["fwd_ms"],
        "bwd_ms": measured["bwd_ms"],
        "bubble_ms": exposed.bubble_s * 1e3,
        "dpsync_ms": exposed.grad_sync_s * 1e3,
    }
    return {**columns, "ppsync_ms": timeline.period_s * 1e3 - sum(columns.values())}


def _predict_zero3(tables: Tables, row: Row, fit: Fit) -> dict[str, float]:
    """Gathering the parameters takes longer than what it could hide behind, in both directions."""
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
        volumes = [max(_rank_sync_bytes(tables, row)) for row in serial]
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


def _rank_sync_bytes(tables: Tables, row: Row) -> Iterable[float]:
    nodes = tables.nodes_per_group(row)
    return (grad_sync_s(w, nodes, 1.0) for w in tables.stage_gradient_bytes(row, 1))


def _minimum(function: Callable[[float], float], low: float, high: float) -> float:
    """The minimum of a function with one valley, by thirds."""
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


def published_ms(row: Row) -> float:
    """Return a row's iteration, the sum of its columns."""
    return float(sum(row[column] or 0.0 for column in COLUMNS))


def _node(cluster: str) -> str:
    """Return the name of a cluster's nodes: a100 of A100x128."""
    return cluster.split("x")[0].lower()


def _row(found: Any) -> Row:
    """Return a row of a file; columns that do not apply to its system may be missing or null."""
    if not isinstance(found, dict):
        raise ValueError(f"found {found!r} as a row; it is an object")
    row: Row = dict.fromkeys(COLUMNS) | found
    name = ", ".join(str(row.get(key)) for key in ("cluster", "model", "system"))

    def need(key: str, rule: str, *, holds: bool) -> None:
        if not holds:
            raise ValueError(f"row {name}: found {key}={row.get(key)!r}; {rule}")

    for key in ("cluster", "model", "system"):
        need(key, "it is a name", holds=isinstance(row.get(key), str))
    known = ", ".join(sorted(NODES))
    need("cluster", f"it begins with one of {known}", holds=_node(row["cluster"]) in NODES)
    pipeline = row.get("pp") is not None
    for key in ("batch", "dp", "tp", *["pp"] * pipeline):
        whole = isinstance(row.get(key), int) and row[key] > 0
        need(key, "it is a whole number above zero", holds=whole)
    for key in COLUMNS:
        milliseconds = row[key] is None or (is_number(row[key]) and row[key] >= 0)
        need(key, "it is milliseconds, or null", holds=milliseconds)
    need("fwd_ms", "the columns add up to an iteration above zero", holds=published_ms(row) > 0)
    if pipeline:
        full = row["dp"] * MICROBATCH_SIZE
        rule = f"dp={row['dp']} micro-batches of {MICROBATCH_SIZE} take {full}"
        need("batch", rule, holds=row["batch"] >= full)
        folds = row["system"] == "Fold3D"
        need("ns", "Fold3D has one or more segments", holds=bool(row.get("ns")) or not folds)
    else:
        gpus = NODES[_node(row["cluster"])].gpus_per_node
        need("pp", f"without a pipeline dp is {gpus} or more", holds=row["dp"] >= gpus)
    return row


def _shape(model: str, sizes: dict[str, Row]) -> ModelShape:
    name = model.lower().replace("gpt-3 ", "gpt3-")
    if name in SHAPES:
        return SHAPES[name]
    if model not in sizes:
        raise ValueError(f"{model} is neither a known shape nor a row of table_I")
    row = sizes[model]
    return ModelShape(
        name=name,
        num_layers=row["layers"],
        hidden_size=row["hidden"],
        num_attention_heads=row["heads"],
        seq_length=1024,
    )

"""The rows of the paper's Tables II and III, read from a file and checked."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.fold3d.observe.fields import is_number
from megatron.fold3d.policy.partition import layers_of_stages
from megatron.fold3d.predict.cost_model.cluster import NODES
from megatron.fold3d.predict.cost_model.model_shape import SHAPES, ModelShape

MICROBATCH_SIZE = 4  # "without further specifications", Sec. VI
GRADIENT_BYTES = 2
COLUMNS = ("fwd_ms", "bwd_ms", "bubble_ms", "dpsync_ms", "ppsync_ms")
SIZES = ("gmem_gb", "excmem_gb", "thrp_tflops", "util_pct")

_MISPRINT = 0.01  # Util. and Thrp. of a row agree to this, or one of them is wrong

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tables:
    """The rows of a file and what they refer to."""

    rows: tuple[Row, ...]
    shapes: dict[str, ModelShape]
    gpus_per_node: dict[str, int]
    peak_tflops: dict[str, float]
    flags: tuple[str, ...]
    """The errors in the paper that the file itself notes."""

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
        """Return the row that gives the computation: Megatron's, same cluster and model."""
        same = [r for r in self.rows if all(r[k] == row[k] for k in ("cluster", "model"))]
        return next((r for r in same if r["system"].startswith("Megatron")), row)

    def replicas_per_node(self, row: Row) -> int:
        """Return how many data-parallel replicas of a stage a node holds."""
        tensor_parallel: int = row["tp"]
        return max(1, self.gpus_per_node[row["cluster"]] // tensor_parallel)

    def layers(self, row: Row, num_segments: int) -> tuple[int, ...]:
        """Return the layers of each stage: BERT's 72 do not divide into 16 stages."""
        return layers_of_stages(self.shapes[row["model"]].num_layers, row["pp"], num_segments)

    def stage_gradient_bytes(self, row: Row, num_segments: int) -> list[float]:
        """Return w of Sec. III-C for each stage: the gradients of all GPUs of a node."""
        parameters = self.shapes[row["model"]].stage_parameters(self.layers(row, num_segments))
        return [p.total * GRADIENT_BYTES * self.replicas_per_node(row) for p in parameters]

    def nodes_per_group(self, row: Row) -> int:
        """Return d_inter of Sec. III-C."""
        return int(row["dp"] // self.replicas_per_node(row))


def published_ms(row: Row) -> float:
    """Return a row's iteration: the sum of its columns, or what is said of a withheld row."""
    if "withheld" in row:
        return float(row.get("iteration_ms") or 0.0)
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

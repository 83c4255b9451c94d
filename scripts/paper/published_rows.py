"""The rows of the paper's Tables II and III, and what they refer to."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.fold3d.policy.partition import layers_of_stages
from megatron.fold3d.predict.cost_model.cluster import NODES
from megatron.fold3d.predict.cost_model.model_shape import SHAPES, ModelShape

FILE = Path(__file__).parents[2] / "tests/data/fold3d_tables.json"
MICROBATCH_SIZE = 4  # "without further specifications", Sec. VI
GRADIENT_BYTES = 2
COLUMNS = ("fwd_ms", "bwd_ms", "bubble_ms", "dpsync_ms", "ppsync_ms")
SIZES = ("gmem_gb", "excmem_gb", "thrp_tflops", "util_pct")

_MISPRINT = 0.01  # Util. and Thrp. of a row agree to this, or one of them is wrong

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tables:
    """The rows, and what they refer to."""

    rows: tuple[Row, ...]
    shapes: dict[str, ModelShape]
    gpus_per_node: dict[str, int]
    peak_tflops: dict[str, float]

    @classmethod
    def read(cls) -> "Tables":
        """Read the rows; columns that do not apply to a row's system are None."""
        found = json.loads(FILE.read_text())
        rows = [dict.fromkeys(COLUMNS) | row for row in (*found["table_II"], *found["table_III"])]
        nodes = {row["cluster"]: NODES[_node(row["cluster"])] for row in rows}
        return cls(
            rows=tuple(rows),
            shapes={row["model"]: SHAPES[shape_name(row["model"])] for row in rows},
            gpus_per_node={name: node.gpus_per_node for name, node in nodes.items()},
            peak_tflops={name: node.gpu_flops_per_s / 1e12 for name, node in nodes.items()},
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


def shape_name(model: str) -> str:
    """Return what the planner calls a model of the tables."""
    return model.lower().replace("gpt-3 ", "gpt3-")

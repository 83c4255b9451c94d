"""The roofline of `predict.cost_model.efficiency` against published points.

    python -m scripts.bench.efficiency

Each GPU has one fitted number, `Cluster.compute_efficiency`: the one with the smallest largest
error on the points that are marked as fitted. The error on the others is what the roofline is
worth. Points are Tables 1 and 2 of PTD-P: TFLOP/s of whole iterations, with the micro-batches that
are fastest, as a run is tuned. Others are forward plus backward of FOLD3D's Table II. Left out are
BERT, whose widths are no multiples of 8, and T-NLG, whose sequence length its table does not say.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.predict.cost_model.estimate import estimate
from megatron.fold3d.predict.cost_model.model_shape import model_shape
from megatron.fold3d.predict.cost_model.sizes import Setup
from scripts.paper.published_rows import shape_name

_TABLES = Path(__file__).parents[2] / "tests" / "data"
_PTD_P = {174.6: (96, 12288, 96, 12), 529.6: (105, 20480, 128, 35)}  # layers, hidden, heads, pp


@dataclass(frozen=True, slots=True)
class Point:
    """A published time, and what predicts it from the efficiency of large products."""

    name: str
    gpu: str
    seconds: float
    predict: Callable[[float], float]
    is_fitted: bool

    def error(self, reached: float) -> float:
        """Return by how much the predicted time is longer."""
        return self.predict(reached) / self.seconds - 1


def points() -> list[Point]:
    """Return all points; every second row of Table 1 and FOLD3D's 18B are fitted."""
    ptd_p, fold3d = (
        json.loads((_TABLES / f"{name}_tables.json").read_text(encoding="utf-8"))
        for name in ("megatron", "fold3d")
    )
    found = [_of_ptd_p(row, (1, 2, 4, 8, 16)) for row in ptd_p["table_1"]]
    found = [replace(point, is_fitted=i % 2 == 0) for i, point in enumerate(found)]
    for row in ptd_p["table_2"]:
        if row["scheme"] == "PTD":
            layers, hidden, heads, ranks = _PTD_P[row["params_B"]]
            sizes = {"layers": layers, "hidden": hidden, "heads": heads, "pp": ranks, "tp": 8}
            found.append(_of_ptd_p({**row, **sizes, "tflops_per_gpu": row["tflops"]}, (1,)))
    systems = ("Fold3D", "Megatron-PTD", "Megatron-SP")
    return [*found, *(_of_fold3d(row) for row in fold3d["table_II"] if row["system"] in systems)]


def _of_ptd_p(row: dict[str, Any], microbatch_sizes: tuple[int, ...]) -> Point:
    """Return a point of whole iterations: a pipeline with two segments, then its DP.sync."""
    layers, hidden, heads = row["layers"], row["hidden"], row["heads"]
    shape = model_shape(f"{layers}-{hidden}-{heads}-2048")
    ranks, tensor, gpus, batch = row["pp"], row["tp"], row["gpus"], row["batch"]
    replicas = gpus // ranks // tensor
    name = f"dgx-a100x{gpus}"
    flops = 96 * batch * 2048 * layers * hidden**2  # the paper's equation 3
    flops *= 1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden)

    def of_size(reached: float, size: int) -> float:
        setup = Setup(
            tensor_parallel=tensor,
            data_parallel=replicas,
            microbatch_size=size,
            recompute="full",
            local_layers=True,
        )
        hardware = replace(cluster(name), compute_efficiency=reached)
        costs = estimate(shape, hardware, setup, num_ranks=ranks, num_segments=1).costs
        stages = [f + b for f, b in zip(costs.forward_s, costs.backward_s, strict=True)]
        fill_s = sum(stages[1:]) / (2 if ranks > 1 else 1)
        return float(batch // replicas // size * max(stages) + fill_s + max(costs.grad_sync_s))

    def predict(reached: float) -> float:
        whole = [size for size in microbatch_sizes if batch % (replicas * size) == 0]
        return min(of_size(reached, size) for size in whole)

    seconds = flops / gpus / (row["tflops_per_gpu"] * 1e12)
    what = f"PTD-P {row['params_B']}B on {gpus}"
    return Point(what, "a100", seconds, predict, is_fitted=False)


def _of_fold3d(row: dict[str, Any]) -> Point:
    """Return a point of the forwards and backwards of a rank."""
    gpu = row["cluster"].partition("x")[0].lower()
    setup = Setup(
        tensor_parallel=row["tp"],
        data_parallel=row["dp"],
        microbatch_size=4,
        sequence_parallel=row["system"] != "Megatron-PTD",
        recompute="full",
        small_gradients=True,
        local_layers=True,
    )

    hardware = cluster(f"{gpu}x{row['n_gpus']}")

    def predict(reached: float) -> float:
        known = estimate(
            model_shape(shape_name(row["model"])),
            replace(hardware, compute_efficiency=reached),
            setup,
            num_ranks=row["pp"],
            num_segments=1,
        ).costs
        of_all = sum(known.forward_s) + sum(known.backward_s)
        return float(of_all / row["pp"] * (row["batch"] // row["dp"] // 4))

    return Point(
        f"{row['system']} {row['model']} on {gpu.upper()}",
        gpu,
        (row["fwd_ms"] + row["bwd_ms"]) / 1e3,
        predict,
        is_fitted=row["model"] == "GPT-3 18B",
    )


def fitted(of: list[Point]) -> float:
    """Return the efficiency with the smallest largest error, in hundredths."""

    def worst(reached: float) -> float:
        return max(abs(point.error(reached)) for point in of if point.is_fitted)

    return min((n / 100 for n in range(50, 91)), key=worst)


def main() -> None:
    """Print the fit of each GPU, and the error of each point."""
    for gpu in ("a100", "v100"):
        own = [point for point in points() if point.gpu == gpu]
        reached = fitted(own)
        sys.stdout.write(f"{gpu.upper()}: large products reach {reached:.0%} of the peak\n")
        for point in own:
            use = "fitted" if point.is_fitted else "held out"
            sys.stdout.write(f"  {point.name:<32} {use:<9} {point.error(reached):>+6.1%}\n")


if __name__ == "__main__":
    main()

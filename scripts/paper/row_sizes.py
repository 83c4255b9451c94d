"""The columns of Tables II and III that are no times: memory, throughput and utilization.

Nothing is fitted. Throughput counts the FLOPs that a model's Megatron row implies: its throughput
times its iteration. A GPU's memory is that of its tensors, without what CUDA, NCCL and the
allocator take.
"""

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.schedule_word import STOCK
from megatron.fold3d.predict.cost_model.sizes import (
    Setup,
    held_parameters,
    layer_bytes,
    saved_bytes,
    working_bytes,
)
from megatron.fold3d.predict.search.candidates import Candidate
from scripts.paper.perf_model import aiao_activation_bytes
from scripts.paper.points import model_share
from scripts.paper.published_rows import GRADIENT_BYTES, MICROBATCH_SIZE, Row, Tables, published_ms
from scripts.paper.table_rows import segments_of

STATE_BYTES = 20
"""Per parameter in fp16: itself, its gradient, both in fp32 for the optimizer, and two moments.

Published memory of DSpeed3D is that of replicas which hold all of it, so it is counted whole.
"""


def predict_sizes(tables: Tables, row: Row, iteration_ms: float) -> dict[str, float]:
    """Return memory in GB, hardware and model TFLOP/s of a GPU, and the first as % of the peak."""
    measured = tables.measured(row)
    thrp = float(measured["thrp_tflops"]) * published_ms(measured) / iteration_ms
    gpu_bytes = _pipeline_bytes(tables, row) if row.get("pp") else _zero3_bytes(tables, row)
    host_bytes = {"excmem_gb": _host_bytes(tables, row) / 1e9} if row["system"] == "Fold3D" else {}
    return {
        "gmem_gb": gpu_bytes / 1e9,
        **host_bytes,
        "thrp_tflops": thrp,
        "model_tflops": thrp * model_share(tables.shapes[row["model"]]),
        "util_pct": thrp / tables.peak_tflops[row["cluster"]] * 100,
    }


def _pipeline_bytes(tables: Tables, row: Row) -> float:
    """Return what the fullest GPU holds: states, checkpoints, and the layer that it recomputes."""
    shape, segments, folds = tables.shapes[row["model"]], segments_of(row), row.get("ns")
    setup = Setup(
        tensor_parallel=row["tp"],
        microbatch_size=MICROBATCH_SIZE,
        sequence_parallel=True,
        recompute="full",
    )
    candidate = Candidate(
        choice=Choice.plain("aiao" if folds else STOCK, segments),
        setup=setup,
        num_ranks=row["pp"],
        num_microbatches=_microbatches(row),
        offload=bool(folds),
    )
    split = tables.layers(row, segments)
    held = [stage.dense for stage in held_parameters(shape, setup, split)]
    saved, working = saved_bytes(shape, setup, split), working_bytes(shape, setup, split)
    return max(
        sum(held[of_rank]) * STATE_BYTES
        + candidate.most_activations(rank) * max(saved[of_rank])
        + max(working[of_rank])
        for rank in range(row["pp"])
        for of_rank in [slice(rank, None, row["pp"])]
    )


def _zero3_bytes(tables: Tables, row: Row) -> float:
    """Return what a GPU holds: its shard, all checkpoints, and one layer whole."""
    shape = tables.shapes[row["model"]]
    setup = Setup(microbatch_size=row["batch"] // row["dp"], recompute="full")
    (held,) = held_parameters(shape, setup, 1)
    layer = held.dense / shape.num_layers * 2 * GRADIENT_BYTES  # and its gradients
    (saved,), (working,) = saved_bytes(shape, setup, 1), working_bytes(shape, setup, 1)
    return held.dense * STATE_BYTES / int(row["dp"]) + layer + saved + working


def _host_bytes(tables: Tables, row: Row) -> float:
    """Return a node's checkpoints (eq. 7): an input for each layer and micro-batch."""
    setup = Setup(microbatch_size=MICROBATCH_SIZE)
    saved = layer_bytes(tables.shapes[row["model"]], setup, "full")
    layers = tables.layers(row, row["ns"])
    most = max(sum(layers[rank :: row["pp"]]) for rank in range(row["pp"]))
    of_segment = saved * most / row["ns"]
    of_replica = aiao_activation_bytes(row["ns"], _microbatches(row), of_segment)
    return float(of_replica * tables.replicas_per_node(row))


def _microbatches(row: Row) -> int:
    return int(row["batch"] // row["dp"] // MICROBATCH_SIZE)

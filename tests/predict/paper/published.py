"""GPT-3 39B on the paper's A100 cluster: Table II, with the software overhead of a chunk's task."""

from dataclasses import replace

from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.predict.cost_model.sizes import Setup

A100 = replace(
    cluster("a100x128-200g"),
    task_overhead_s=5e-3,
    compute_efficiency=0.45,
    memory_bytes_per_s=0.0,  # one efficiency for all layers
)
QUEUE_PER_STREAM = replace(A100, is_blackwell=True)
"""The same as the paper models it: no stream waits for another to have its turn."""
SETUP_39B = Setup(
    tensor_parallel=8, data_parallel=4, microbatch_size=4, sequence_parallel=True, recompute="full"
)

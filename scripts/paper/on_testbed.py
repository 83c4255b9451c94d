"""A small GPT on the testbed's slow links, which stands for the paper's models.

Its layers are paced, as in `scripts/demo.py`: DP.sync takes about a third of an iteration. The loss
curves and the ablation train it.
"""

from megatron.fold3d.predict.cost_model.model_shape import model_shape
from scripts.bench.runner import paced
from scripts.bench.variants import Job
from scripts.paper.points import Point

RATE = "180mbit"
"""Of each host's link; a host has one rank."""
RANK_FLAGS = paced(6, 12)
"""Of `scripts.bench.rank`."""
POINT = Point(node="testbed", model="8-128-2-64", batch=16, dp=2, pp=2, tp=1, microbatch_size=2)


def job(num_iterations: int) -> Job:
    """Return the training of so many iterations, on random tokens."""
    shape = model_shape(POINT.model)
    return Job(
        num_ranks=POINT.pp,
        data_parallel=POINT.dp,
        num_microbatches=POINT.layout.microbatches,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        seq_length=shape.seq_length,
        micro_batch_size=POINT.microbatch_size,
        num_iterations=num_iterations,
        clip_grad=0.0,
        recompute=True,  # as in the paper; offload starts from it
    )

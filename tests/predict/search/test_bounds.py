"""The layers of stages, simulated."""

import json
from itertools import product
from pathlib import Path

import pytest

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.policy.partition import best_partition, layers_of_stages
from megatron.fold3d.predict.cost_model.hardware_profile import HardwareProfile
from megatron.fold3d.predict.search.bounds import rank_times
from megatron.fold3d.predict.search.segments import iterations

MERAK = json.loads((Path(__file__).parents[2] / "data" / "merak_tables.json").read_text())
HEAD = 50304 / (12 * 1536)  # in layers of GPT-1.4B: its matrix beside the 12 h^2 of a layer


def profile(head: float, embedding: float = 0.0, again: float = 1.0) -> HardwareProfile:
    """Seconds in forwards of a layer; a backward of layers is twice that and a recomputation."""
    return HardwareProfile(
        layer_forward_s=1.0,
        layer_backward_s=2.0 + again,
        head_forward_s=head,
        head_backward_s=2 * head,
        embedding_forward_s=embedding,
        embedding_backward_s=embedding,
        message_s=0.0,
        message_latency_s=0.0,
        grad_sync_s_per_byte=0.0,
        grad_sync_latency_s=0.0,
        layer_gradient_bytes=0.0,
        head_gradient_bytes=0.0,
    )


def partition(measured: HardwareProfile, num_layers: int, segments: int, job: Job):
    start = layers_of_stages(num_layers, job.num_ranks, segments)
    return best_partition(
        start,
        iteration_s=lambda layers: iterations(job, segments, measured.costs(layers)).period_s,
        times=rank_times(measured.costs, start, job.num_ranks, job.num_microbatches),
        most_simulated=300,
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_microbatches", [32, 64])
def test_meraks_stages_of_gpt2_are_those_with_the_shortest_iteration(num_microbatches):
    # Of its 98 parts the embedding is the first and the head the last; a layer is two.
    one_f_one_b = Choice.plain("1f1b", 1, share=1.0).changed(step="next")
    job = Job(choice=one_f_one_b, num_ranks=4, num_microbatches=num_microbatches)
    found = partition(profile(HEAD), 48, 1, job)
    assert found.is_exact
    parts = [2 * count for count in found.layers]
    parts[0] += 1
    parts[-1] += 1
    assert parts == MERAK["partition_example"]["autopipe_4_stages"]


@pytest.mark.parametrize(
    ("schedule", "ranks", "segments", "num_layers"),
    [("1f1b", 3, 1, 9), ("1f1b", 4, 1, 9), ("aiao", 2, 2, 9), ("interleaved", 2, 2, 8)],
)
def test_no_other_layout_has_a_shorter_simulated_iteration(schedule, ranks, segments, num_layers):
    job = Job(choice=Choice.plain(schedule, 1), num_ranks=ranks, num_microbatches=4)
    measured = profile(head=1.7, embedding=0.4)
    found = partition(measured, num_layers, segments, job)
    stages = ranks * segments
    counts = product(range(1, num_layers - stages + 2), repeat=stages)
    least_s = min(
        iterations(job, segments, measured.costs(layers)).period_s
        for layers in counts
        if sum(layers) == num_layers
    )
    assert found.is_exact
    assert found.iteration_s == pytest.approx(least_s)

"""The line that says whether sums inside nodes pay."""

from dataclasses import replace

import pytest

from megatron.fold3d.commands.hierarchical_gain import hierarchical_gain
from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.predict.cost_model.model_shape import model_shape
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.candidates import Candidate

SHAPE = model_shape("12-1024-16-512")
ON = Setup(data_parallel=16, hierarchical_sync=True)
OFF = replace(ON, hierarchical_sync=False)


def lines(setup: Setup, name: str, **changes: float) -> list[str]:
    candidate = Candidate(
        schedule="aiao",
        is_stock=False,
        setup=setup,
        num_ranks=2,
        num_segments=2,
        num_microbatches=4,
    )
    return list(hierarchical_gain(candidate, SHAPE, replace(cluster(name), **changes)))


def test_what_is_asked_for_is_judged():
    (pays,) = lines(ON, "a100x32-100g")
    assert pays.startswith("--hierarchical-dp-sync auto: DP.sync of the largest stage takes ")
    assert pays.endswith(" ms: it pays")
    (slow,) = lines(ON, "a100x32-100g", intra_bytes_per_s=1e9)
    assert slow.endswith(": it does not pay, drop it")
    assert lines(replace(ON, data_parallel=8), "a100x16") == [
        "--hierarchical-dp-sync auto: off here, for replicas do not share nodes and span several"
    ]


def test_what_would_pay_is_proposed_where_training_takes_it():
    (line,) = lines(OFF, "a100x32-100g")
    assert line.startswith(
        "--hierarchical-dp-sync auto may pay: DP.sync of the largest stage would"
    )
    assert lines(OFF, "a100x32-100g", intra_bytes_per_s=1e9) == []
    assert lines(replace(OFF, distributed_optimizer=True), "a100x32-100g") != []
    tensor_parallel = replace(OFF, tensor_parallel=2)
    assert lines(tensor_parallel, "a100x64-100g") == []  # one hardware queue
    assert lines(tensor_parallel, "b200x64-100g") != []


@pytest.mark.parametrize("setup", [OFF, replace(OFF, data_parallel=8)])
def test_nothing_is_said_of_one_node(setup: Setup):
    assert lines(setup, "a100x32", gpus_per_node=32, num_nodes=1) == []

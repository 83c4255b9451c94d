"""What it costs that every replica steps some segments in full."""

from dataclasses import replace

import pytest

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.predict.search.descent import Descent, Space
from megatron.fold3d.predict.search.judge import Judge
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link

# Of one rank, three segments and two micro-batches: forwards take 2 s each, backwards 6.
ORDER = build("afab", num_ranks=1, num_segments=3, num_microbatches=2)
SHARDED = replace(
    Costs.uniform(3, backward_s=3.0, grad_sync_s=3.0),
    param_gather_s=(3.0, 3.0, 3.0),
    weight_s=(0.0,) * 3,
)


def judge(choice: Choice, costs: Costs = SHARDED) -> Judge:
    return Judge(
        job=Job.of(ORDER, choice, gathers_params=True, reduces_early=True),
        costs=costs.with_replicated(choice.where(optimizer="replicated")),
        link=Link(preemptive=False),
    )


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    costs = SHARDED.with_replicated({1})
    assert costs.grad_sync_s == (3.0, 6.0, 3.0)
    assert costs.param_gather_s == (3.0, 0.0, 3.0)


@pytest.mark.parametrize(
    ("word", "seconds"),
    [
        # Gathers until 9 s, then the last segment's forwards; the first reduce-scatter is exposed.
        ("afab", 9 + 2 + 18 + 3),
        # Segment 1 needs no gather: only the first one is exposed.
        ("afab:optimizer=replicated@1", 3 + 6 + 18 + 3),
        # Segment 0 has both of its halves behind the last backward.
        ("afab:optimizer=replicated@0", 6 + 2 + 18 + 6),
    ],
)
def test_bytes_move_from_the_forward_to_the_backward(word: str, seconds: float):
    assert judge(Choice.parse(word, 3)).predicted().seconds == seconds


def test_the_search_replicates_what_shortens_the_iteration():
    free = {"optimizer": ("sharded", "replicated")}
    search = Descent(judge, Space(orders=(Choice.plain("afab", 3),), free=free))
    assert str(search.best.choice) == "afab:optimizer=replicated@1"


@pytest.mark.parametrize(
    ("word", "exposed_s"),
    [
        ("afab", 3.0),
        ("afab:wgrad=last@0", 1.5),
        ("afab:wgrad=last@0,1", 1.5),  # the first one's starts with half of its weight gradients
    ],
)
def test_reductions_to_shards_start_between_weight_gradients(word: str, exposed_s: float):
    costs = replace(SHARDED, weight_s=(1.5,) * 3)
    assert judge(Choice.parse(word, 3), costs).predicted().seconds == 9 + 2 + 18 + exposed_s

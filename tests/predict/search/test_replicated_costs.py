"""What it costs that every replica steps some segments in full."""

from dataclasses import replace

import pytest

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.predict.search.judge import Judge
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link
from tests.plans import built

# Of one rank, three segments and two micro-batches: forwards take 2 s each, backwards 6.
ORDER = built("afab", 1, 3, 2)
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

"""Simulated iterations in which every replica steps some segments in full."""

from dataclasses import replace
from functools import partial

import pytest

from megatron.fold3d.observe.memory_curve import Footprint
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.policy.measured_times import MeasuredTimes
from megatron.fold3d.policy.replicated_segments import choose_replicated, units
from megatron.fold3d.policy.run_choice import RunChoice
from megatron.fold3d.predict.cost_model.estimate import Estimate
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.candidate_timeline import timeline_of
from megatron.fold3d.predict.search.candidates import Candidate
from megatron.fold3d.predict.search.choice_search import ChoiceSearch
from megatron.fold3d.predict.search.replicated_choice import with_replicated
from megatron.fold3d.predict.simulator.costs import Costs

# Of one rank, three segments and two micro-batches: forwards take 2 s each, backwards 6.
ORDER = build("afab", num_ranks=1, num_segments=3, num_microbatches=2)
SHARDED = replace(
    Costs.uniform(3, backward_s=3.0, grad_sync_s=3.0),
    param_gather_s=(3.0, 3.0, 3.0),
    weight_s=(0.0,) * 3,
)
RUN = Candidate(
    schedule="afab",
    is_stock=False,
    setup=Setup(data_parallel=2, distributed_optimizer=True),
    num_ranks=1,
    num_segments=3,
    num_microbatches=2,
    reduces_early=True,
)


def seconds(replicated: tuple[int, ...], run: Candidate = RUN, costs: Costs = SHARDED) -> float:
    """Simulate an iteration in which every replica steps some segments in full."""
    nothing = Footprint(static_bytes=(0.0,), saved_bytes=(0.0,) * 3)
    known = Estimate(with_replicated(costs, replicated), nothing, (0,))
    return timeline_of(replace(run, replicated=replicated), known).period_s


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather():
    costs = with_replicated(SHARDED, {1})
    assert costs.grad_sync_s == (3.0, 6.0, 3.0)
    assert costs.param_gather_s == (3.0, 0.0, 3.0)


def test_bytes_move_from_the_forward_to_the_backward():
    # Gathers until 9 s, then the last segment's forwards; the first reduce-scatter is exposed.
    assert seconds(()) == 9 + 2 + 18 + 3
    # Segment 1 needs no gather: only the first one is exposed.
    assert seconds((1,)) == 3 + 6 + 18 + 3
    # Segment 0 has both of its halves behind the last backward.
    assert seconds((0,)) == 6 + 2 + 18 + 6
    assert choose_replicated(units(3, tied=False), seconds) == ((1,), 30.0)


@pytest.mark.parametrize(
    ("delayed", "exposed_s"),
    [
        ((), 3.0),
        ((0,), 1.5),
        ((0, 1), 1.5),  # the first one's starts with half of its weight gradients
    ],
)
def test_reductions_to_shards_start_between_weight_gradients(delayed, exposed_s):
    costs = replace(SHARDED, weight_s=(1.5,) * 3)
    run = replace(RUN, delayed_weight_grads=delayed)
    assert seconds((), run, costs) == 9 + 2 + 18 + exposed_s


def test_measured_all_reduces_are_halved_and_gathers_have_the_size_of_parameters():
    times = MeasuredTimes(
        forward_s=(1.0,) * 3,
        backward_s=(3.0,) * 3,
        recompute_s=(0.0,) * 3,
        weight_s=(0.0,) * 3,
        transfer_s=0.0,
        grad_sync_s=(6.0,) * 3,
    )
    measured = partial(
        ChoiceSearch.measured,
        times,
        num_ranks=1,
        num_segments=3,
        num_microbatches=ORDER.num_microbatches,
        group_size=None,
        room=float("inf"),
        sizes=(0.0,) * 3,
        gathers=True,
        replicates=True,
        only=RunChoice(name="as configured", order=ORDER),
    )
    found = measured(parameter_share=1.0)
    (best,) = found.to_try()
    assert (best.choice.order, best.choice.replicated, best.seconds) == (ORDER, (1,), 30.0)
    # Gathers of parameters in 16 bits take 1.5 s each: only the first one is exposed.
    assert measured(parameter_share=0.5).stock.seconds == pytest.approx(1.5 + 6 + 18 + 3)
    assert measured(parameter_share=1.0, room=1.0, sizes=(2.0,) * 3).to_try() == []

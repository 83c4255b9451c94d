"""What a search finds worth trying."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import inf
from typing import Any

import pytest

from megatron.fold3d.plan.choice import Choice, free_values, stock_schedule
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.plan.ir import Op, Plan
from megatron.fold3d.predict.search.descent import Descent, Space, orders_worth_trying
from megatron.fold3d.predict.search.judge import Judge
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link

NONE = {"defers": False, "delays": False, "replicates": False, "reduces_early": False}
ALL = NONE | {"defers": True, "delays": True}
SHARDED = NONE | {"delays": True, "replicates": True, "reduces_early": True}


def search(
    segments: int = 4,
    *,
    scope: dict[str, bool] = ALL,
    gathers: bool = False,
    costs: Costs | None = None,
    num_ranks: int = 2,
    num_microbatches: int = 4,
    group: int | None = None,
    keeps_forwards: bool = False,
    most_actions: int = 600_000,
    fits: Callable[[Choice, Plan], bool] = lambda choice, plan: True,
) -> Descent:
    known = costs or Costs.uniform(2 * segments, grad_sync_s=6.0, p2p_s=0.4)

    def judge(choice: Choice) -> Judge:
        whole = choice.stages(num_ranks, optimizer="replicated")
        return Judge(
            job=Job(
                choice=choice,
                num_ranks=num_ranks,
                num_microbatches=num_microbatches,
                gathers_params=gathers,
                reduces_early=scope["reduces_early"],
            ),
            costs=known.with_replicated(whole) if gathers else known,
            link=Link(preemptive=False),
            has_room=lambda plan: fits(choice, plan),
        )

    first = Choice.plain(stock_schedule(segments), segments, group=group)
    orders = orders_worth_trying(judge, first, keeps_forwards=keeps_forwards)
    return Descent(judge, Space(orders=orders, free=free_values(**scope)), most_actions)


def words(found: Descent) -> list[str]:
    return [str(one.choice) for one in found.to_try()]


def test_the_fastest_of_either_kind_is_tried_the_faster_first():
    found = search()
    assert str(found.first.choice) == "interleaved"
    first, second = found.to_try()
    assert first.choice.carries
    assert not second.choice.carries
    assert first.seconds < second.seconds < found.first.seconds
    assert len(first.job.shares) == 8
    assert ":step=next" in str(first.choice)


def test_stocks_groups_are_those_of_the_flag():
    found = search(group=4, scope=NONE)
    assert str(found.first.choice) == "interleaved:group=4"
    assert found.first.seconds < search().first.seconds
    assert words(found) == []  # it is the order of aiao


def test_one_segment_runs_further_ahead_where_transfers_are_slow():
    assert words(search(1, scope=NONE)) == ["1f1b:ahead=2"]


@pytest.mark.parametrize(
    "changed",
    [
        {"costs": Costs.uniform(8)},  # nothing is sent
        {"fits": lambda choice, plan: choice.order == "interleaved"},
        {"most_actions": 0},
        {"num_ranks": 1, "costs": Costs.uniform(4, grad_sync_s=6.0)},
    ],
)
def test_where_nothing_is_faster_or_fits_stocks_order_stays(changed: dict[str, Any]):
    assert words(search(scope=NONE, **changed)) == []


def test_a_search_ends_after_as_many_actions_on_every_machine():
    once = sum(map(len, search().first.job.computed.programs))
    for orders in (0, 1, 2, 3):
        found = search(most_actions=orders * once)
        found.run()
        assert len([one for one in found.found.values() if one]) == 1 + orders


@pytest.mark.slow
def test_with_dropout_forwards_keep_stocks_order():
    kept = search(keeps_forwards=True)
    stock = kept.first.job.computed.select({Op.FORWARD})
    for one in kept.to_try():
        assert one.job.computed.select({Op.FORWARD}) == stock
    assert words(kept)
    assert words(kept) != words(search())


def test_weight_gradients_are_delayed_only_where_that_is_allowed():
    bound: dict[str, Any] = {"num_ranks": 4, "costs": Costs.uniform(4, p2p_s=0.4)}
    (plain,) = words(search(1, **bound, num_microbatches=8, scope=NONE))
    assert plain == "1f1b:ahead=2"
    splitting, whole = words(search(1, **bound, num_microbatches=8, scope=NONE | {"delays": True}))
    assert (splitting, whole) == ("1f1b:wgrad=gaps:ahead=2", plain)


def test_the_first_segment_is_replicated_if_weight_gradients_can_hide_its_all_reduce():
    # Links are fast: only the first segment's DP.sync is exposed, half of it at either end.
    costs = replace(
        Costs.uniform(8, grad_sync_s=2.0), param_gather_s=(2.0,) * 8, weight_s=(1.0,) * 8
    )
    scope = NONE | {"replicates": True, "delays": True}
    found = search(costs=costs, scope=scope, gathers=True)
    first = found.first.choice.changed((0,), optimizer="replicated")
    best, *_ = found.to_try()
    assert 0 in best.choice.where(optimizer="replicated")
    assert best.choice.splits
    assert best.seconds < found.first.seconds <= found.price(first)
    assert words(search(costs=costs, scope=scope | {"delays": False}, gathers=True)) == []


def test_dp_sync_of_the_last_segments_starts_early_where_the_link_is_the_limit():
    # Until their backwards have run, the link has nothing to do, and then it is never idle.
    costs = replace(Costs.uniform(8, grad_sync_s=14.0), weight_s=(1.0,) * 8)
    best, *_ = search(costs=costs, scope=ALL | {"reduces_early": True}).to_try()
    assert best.choice.carries
    assert 3 in best.choice.where(wgrad="behind")
    late, *_ = search(costs=costs).to_try()
    assert best.seconds < late.seconds


def test_reductions_to_shards_start_early_without_memory_for_replicas():
    # In 16 bits gathers take as long as forwards: replicas gain nothing.
    costs = replace(
        Costs.uniform(8, grad_sync_s=7.0), param_gather_s=(3.5,) * 8, weight_s=(1.0,) * 8
    )
    alone = SHARDED | {"replicates": False}
    best, *_ = search(costs=costs, scope=alone, gathers=True).to_try()
    assert best.choice.where(wgrad="behind") == (0, 1, 2, 3)
    late = search(costs=costs, scope=alone | {"reduces_early": False}, gathers=True)
    assert best.seconds < min(one.seconds for one in (late.first, *late.to_try())) - 3.0


@pytest.mark.parametrize("gathers", [False, True])
def test_the_first_segment_is_delayed_where_its_dp_sync_starts_between_its_weight_gradients(
    gathers: bool,
):
    costs = replace(Costs.uniform(8, grad_sync_s=4.0), weight_s=(1.0,) * 8)
    if gathers:
        costs = replace(costs, grad_sync_s=(2.0,) * 8, param_gather_s=(2.0,) * 8)
    scope = SHARDED | {"replicates": gathers}
    best, *_ = search(costs=costs, scope=scope, gathers=gathers).to_try()
    assert best.choice.segments[0].wgrad == "behind"
    later = search(costs=costs, scope=scope | {"reduces_early": False}, gathers=gathers)
    assert best.seconds < min(one.seconds for one in (later.first, *later.to_try()))


@pytest.mark.slow
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("sync_s", [2.0, 4.0, 7.0])
def test_of_all_choices_of_three_segments_none_is_faster(sync_s: float, gathers: bool):
    costs = replace(Costs.uniform(6, grad_sync_s=sync_s, p2p_s=0.2), weight_s=(1.0,) * 6)
    if gathers:
        costs = replace(costs, param_gather_s=(sync_s,) * 6)
    scope = SHARDED if gathers else ALL | {"reduces_early": True}
    found = search(3, costs=costs, scope=scope, gathers=gathers, group=4)
    least = found.price(found.best.choice)
    space = Space(orders=found.space.orders[:1], free=found.space.free)
    for carries, states in product((False, True), product(space.states, repeat=3)):
        choice = space.first.changed(step="next" if carries and not gathers else "end")
        for number, state in enumerate(states):
            choice = choice.changed((number,), **state)
        assert found.price(choice) >= least


def judged(choice: Choice, **changed: Any) -> Judge:
    job = Job(choice=choice, num_ranks=2, num_microbatches=4)
    return Judge(**{"job": job, "costs": COSTS, "link": Link(preemptive=False)} | changed)


PLAIN = Choice.plain("aiao", 2)
COSTS = Costs.uniform(4, grad_sync_s=6.0, p2p_s=0.4)


def test_iterations_that_memory_has_no_room_for_take_forever():
    assert judged(PLAIN).predicted().seconds < inf
    assert judged(PLAIN, fits=lambda found: False).predicted().seconds == inf


def test_a_share_that_the_word_has_is_kept():
    found = judged(replace(PLAIN.changed(step="next"), share=0.25)).predicted()
    assert found.job.shares == (0.25,) * 4


def test_steps_behind_all_gradients_count_where_a_rank_ends():
    stepping = judged(PLAIN, costs=replace(COSTS, optimizer_s=(0.5,) * 4))
    assert stepping.predicted().seconds == pytest.approx(judged(PLAIN).predicted().seconds + 1.0)


def test_an_exchange_swaps_what_two_segments_do():
    space = Space(orders=[Choice.plain("aiao", 3)], free={"wgrad": ("backward", "last")})
    choice = space.first.changed((0,), wgrad="last")
    assert [one.where(wgrad="last") for one in space.exchanges(choice)] == [(1,), (2,)]


def test_tied_ends_are_summed_alike():
    space = Space(
        orders=[Choice.plain("aiao", 3)], free={"optimizer": ("sharded", "replicated")}, tied=True
    )
    ones = [one for others in space.along(space.first) for one in others]
    assert any(one.where(optimizer="replicated") for one in ones)
    for one in ones:
        assert one.segments[0].optimizer == one.segments[-1].optimizer

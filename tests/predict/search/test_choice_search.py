"""What ``--schedule auto`` finds worth trying."""

from dataclasses import replace
from typing import Any

import pytest

from megatron.fold3d.plan.ir import Op
from megatron.fold3d.plan.passes.place_weight_grads import HeldSizes
from megatron.fold3d.policy.measured_times import MeasuredTimes
from megatron.fold3d.predict.search.choice_search import ChoiceSearch, Scope
from megatron.fold3d.predict.simulator.costs import Costs

ALL = Scope(defers=True, delays=True)


def search(segments: int = 4, **changed: Any) -> ChoiceSearch:
    costs = Costs.uniform(2 * segments, grad_sync_s=6.0, p2p_s=0.4)
    given: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 4, "scope": ALL, "costs": costs}
    return ChoiceSearch(**given | {"num_segments": segments} | changed)


def flags(found: ChoiceSearch) -> list[str]:
    return [str(one.choice) for one in found.to_try()]


def test_the_fastest_of_either_kind_is_tried_the_faster_first():
    found = search()
    assert str(found.stock.choice) == "interleaved"
    first, second = found.to_try()
    assert first.choice.defers
    assert not second.choice.defers
    assert first.seconds < second.seconds < found.stock.seconds
    assert first.seconds == found.seconds(first.choice)
    assert ":step=next" in str(first.choice)


def test_stocks_groups_are_those_of_the_flag():
    found = search(group_size=4)
    name = "interleaved:group=4"
    assert str(found.stock.choice) == name
    assert found.stock.seconds < search().stock.seconds
    assert flags(replace(found, scope=Scope())) == []  # it is the order of aiao


def test_one_segment_runs_further_ahead_where_transfers_are_slow():
    assert flags(search(1, scope=Scope())) == ["1f1b:ahead=2"]


@pytest.mark.parametrize(
    "changed",
    [
        {"costs": Costs.uniform(8)},  # nothing is sent
        {"fits": lambda choice, plan: False},
        {"most_actions": 0},
        {"num_ranks": 1, "scope": Scope(), "costs": Costs.uniform(4, grad_sync_s=6.0)},
    ],
)
def test_where_nothing_is_faster_or_fits_stocks_order_stays(changed: dict[str, Any]):
    assert flags(search(**{"scope": Scope()} | changed)) == []


def test_a_search_ends_after_as_many_actions_on_every_machine():
    found = search()
    once = sum(map(len, found.stock.choice.order.programs))
    names = [str(one.choice) for one in found._found()]
    for orders in (1, 2, 3):
        few = replace(found, most_actions=orders * once)
        assert [str(one.choice) for one in few._found()][:2] == names[:orders][:2]
        assert len(few._found()) == orders


@pytest.mark.slow
def test_with_dropout_forwards_keep_stocks_order():
    kept = search(scope=replace(ALL, keeps_forwards=True))
    stock = kept.stock.choice.order.select({Op.FORWARD})
    for one in kept.to_try():
        assert one.choice.order.select({Op.FORWARD}) == stock
    assert flags(kept)
    assert flags(kept) != flags(search())


def test_segments_are_replicated_with_a_distributed_optimizer_as_far_as_memory_has_room():
    eight = (3.0,) * 8
    times = MeasuredTimes(
        forward_s=(1.0,) * 8,
        backward_s=(2.0,) * 8,
        recompute_s=(0.0,) * 8,
        weight_s=(0.0,) * 8,
        transfer_s=0.1,
        grad_sync_s=(12.0,) * 8,
    )
    given: dict[str, Any] = {
        "num_ranks": 2,
        "num_segments": 4,
        "num_microbatches": 4,
        "group_size": None,
        "parameter_share": 1.0,
        "sizes": (5.0,) * 4,
        "gathers": True,
        "replicates": True,
    }

    def replicated(room: float, held: HeldSizes | None = None) -> int:
        found = ChoiceSearch.measured(replace(times, held=held), room=room, **given).to_try()
        return max((len(one.choice.replicated) for one in found), default=0)

    assert replicated(room=4.0) == 0
    assert 1 <= replicated(room=5.0) <= replicated(room=100.0)
    assert replicated(room=5.0) == 1
    held = HeldSizes(saved=eight, delayed=eight, most=(60.0, 60.0))  # aiao holds 48
    assert replicated(room=100.0, held=held) <= 2


def test_weight_gradients_are_delayed_only_where_that_is_allowed():
    bound = {"num_ranks": 4, "costs": Costs.uniform(4, p2p_s=0.4), "num_microbatches": 8}
    (plain,) = flags(search(1, **bound, scope=Scope()))
    assert plain == "1f1b:ahead=2"
    splitting, whole = flags(search(1, **bound, scope=Scope(delays=True)))
    assert (splitting, whole) == (f"{plain}:wgrad=gaps", plain)


def test_the_first_segment_is_replicated_if_weight_gradients_can_hide_its_all_reduce():
    # Links are fast: only the first segment's DP.sync is exposed, half of it at either end.
    costs = replace(
        Costs.uniform(8, grad_sync_s=2.0), param_gather_s=(2.0,) * 8, weight_s=(1.0,) * 8
    )
    scope = Scope(replicates=True, delays=True, gathers=True)
    found = search(costs=costs, scope=scope)
    first = replace(found.stock.choice, replicated=(0,))
    delayed = replace(found.stock.choice, delayed=(1,))
    assert found.seconds(first) == found.stock.seconds <= found.seconds(delayed)
    best, *_ = found.to_try()
    assert 0 in best.choice.replicated
    assert best.choice.delayed
    assert best.seconds <= found.seconds(replace(first, delayed=(1,))) < found.stock.seconds
    assert flags(replace(found, scope=replace(scope, delays=False))) == []


def test_dp_sync_of_the_last_segments_starts_early_where_the_link_is_the_limit():
    # Until their backwards have run, the link has nothing to do, and then it is never idle.
    costs = replace(Costs.uniform(8, grad_sync_s=14.0), weight_s=(1.0,) * 8)
    best, *_ = search(costs=costs, scope=replace(ALL, reduces_early=True)).to_try()
    assert best.choice.early
    assert best.choice.early == best.choice.delayed[-len(best.choice.early) :]
    assert best.choice.early[-1] == 3
    assert str(best.choice).endswith(":step=next:wgrad=behind@2,3")
    late, *_ = search(costs=costs).to_try()
    assert best.seconds < late.seconds
    # At least the weight gradients of one segment, but those of one parameter.
    assert late.seconds - best.seconds <= 4.0 + 0.01  # shares are thousandths


def test_reductions_to_shards_start_early_without_memory_for_replicas():
    # In 16 bits gathers take as long as forwards: replicas gain nothing.
    costs = replace(
        Costs.uniform(8, grad_sync_s=7.0), param_gather_s=(3.5,) * 8, weight_s=(1.0,) * 8
    )
    scope = Scope(delays=True, gathers=True, reduces_early=True)
    best, *_ = search(costs=costs, scope=scope).to_try()
    assert (best.choice.delayed, best.choice.early) == ((0, 1, 2, 3), (0, 1, 2, 3))
    replicas = replace(scope, replicates=True)
    faster = replace(costs, param_gather_s=(14.0,) * 8)
    both = [one.choice for one in search(costs=faster, scope=replicas).to_try()]
    assert sorted(bool(choice.early) for choice in both) == [False, True]
    late = search(costs=costs, scope=replace(scope, reduces_early=False))
    others = (late.stock, *late.to_try())
    assert not any(one.choice.delayed for one in others)
    assert best.seconds < min(one.seconds for one in others) - 3.0


@pytest.mark.parametrize("gathers", [False, True])
def test_the_first_segment_is_delayed_where_its_dp_sync_starts_between_its_weight_gradients(
    gathers: bool,
):
    costs = replace(Costs.uniform(8, grad_sync_s=4.0), weight_s=(1.0,) * 8)
    if gathers:
        costs = replace(costs, grad_sync_s=(2.0,) * 8, param_gather_s=(2.0,) * 8)
    scope = Scope(delays=True, replicates=gathers, gathers=gathers, reduces_early=True)
    best, *_ = search(costs=costs, scope=scope).to_try()
    assert best.choice.delayed[0] == 0
    assert best.choice.replicated[:1] == ((0,) if gathers else ())
    later = search(costs=costs, scope=replace(scope, reduces_early=False))
    assert best.seconds < min(one.seconds for one in (later.stock, *later.to_try()))


@pytest.mark.parametrize("sync_s", [2.0, 4.0, 7.0])
def test_no_change_of_one_segment_is_faster(sync_s: float):
    costs = replace(
        Costs.uniform(8, grad_sync_s=sync_s, p2p_s=0.2),
        param_gather_s=(sync_s,) * 8,
        weight_s=(1.0,) * 8,
    )
    scope = Scope(delays=True, replicates=True, gathers=True, reduces_early=True)
    found = search(costs=costs, scope=scope)
    best = min(found.to_try(), key=lambda one: one.price)
    replicated, delayed = best.choice.replicated, set(best.choice.delayed)
    early = delayed & {*best.choice.early, *replicated}
    parts = replicated, tuple(sorted(early)), tuple(sorted(delayed - early))
    for replicated, early, last in found._nearby(*parts):
        other = replace(
            best.choice,
            replicated=replicated,
            delayed=tuple(sorted({*early, *last})),
            early=found._to_shards(early, replicated),
        )
        assert found._predicted(other, found.seconds(other)).price >= best.price

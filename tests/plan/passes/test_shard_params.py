"""Parameters that are whole only while their stage computes."""

from dataclasses import replace

import pytest

from megatron.fold3d.plan.ir import Op, Plan
from megatron.fold3d.plan.passes.recompute import recompute_early
from megatron.fold3d.plan.passes.shard_params import shard_params
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from megatron.fold3d.plan.verify import verify
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built, planned, whole_at_once


def aiao(num_ranks: int, num_segments: int) -> Plan:
    return built("aiao", num_ranks, num_segments, 2 * num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_segments", [2, 3, 8])
def test_aiao_holds_two_stages_and_gathers_each_at_most_twice(num_ranks: int, num_segments: int):
    plan = shard_params(aiao(num_ranks, num_segments))
    verify(planned(plan))
    assert whole_at_once(plan, parameters=1.0) == (2,) * num_ranks
    for program in plan.programs:
        ops = [op for _, op, _ in program]
        assert ops.count(Op.ALL_GATHER) == num_segments
        # The last two stages are whole between their forwards and their backwards.
        assert ops.count(Op.ALL_GATHER_B) == num_segments - 2
        assert ops.count(Op.FREE_PARAM_B) == num_segments


def test_a_plan_that_frees_nothing_holds_all_stages():
    assert whole_at_once(aiao(2, 4), parameters=1.0) == (4, 4)


def test_recomputation_reads_parameters_and_weight_gradients_do_not():
    plan = delay_weight_grads(aiao(1, 3), [2])
    (program,) = shard_params(recompute_early(plan, range(3))).programs
    words = [str(action) for action in program]
    assert words.index("0ALL_GATHER_B") < words.index("0R0")
    assert words.index("2FREE_PARAM_B") < words.index("2W0")


def test_forwards_alone_keep_their_parameters():
    plan = aiao(2, 3).select({Op.FORWARD})
    assert not shard_params(plan).has(Op.FREE_PARAM)


def test_the_simulator_waits_for_both_gathers():
    order = built("aiao", 1, 3, 1)
    free = Costs.uniform(3, forward_s=1.0, backward_s=2.0)
    slow = replace(free, param_gather_s=(5.0,) * 3)
    assert simulate(shard_params(order), free).makespan_s == pytest.approx(9)
    # Stages 0, 1 and 2 arrive at 5, 10 and 15. Stage 0 is gathered again behind 2B0, from 18 on.
    assert simulate(shard_params(order), slow).makespan_s == pytest.approx(18 + 5 + 2)

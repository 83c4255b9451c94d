"""Gradients that are whole only until they are reduced."""

from typing import Any

import pytest

from megatron.fold3d.plan.ir import Op, Plan, PlanError, Program
from megatron.fold3d.plan.ops import COMPUTE_OPS, GATHER_OPS
from megatron.fold3d.plan.verify import verify
from tests.plans import built, planned, verified, whole_at_once

BOTH: dict[str, Any] = {"shards": "gradients"}


def aiao(num_ranks: int, num_segments: int) -> Plan:
    return built("aiao", num_ranks, num_segments, 2 * num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_segments", [2, 3, 8])
def test_aiao_holds_the_gradients_of_two_stages(num_ranks: int, num_segments: int):
    plan = verified(planned(aiao(num_ranks, num_segments), **BOTH))
    assert whole_at_once(plan, gradients=1.0) == (2,) * num_ranks
    for program in plan.programs:
        assert [op for _, op, _ in program].count(Op.FREE_GRAD) == num_segments - 2


def test_delayed_weight_gradients_are_reduced_before_they_are_freed():
    plan = planned(aiao(2, 4), "wgrad=last@2", **BOTH)
    verify(plan)
    assert whole_at_once(plan, gradients=1.0) == (3, 3)


def _moved(program: Program, index: int, to: int) -> Plan:
    actions = [*program[:index], *program[index + 1 :]]
    return Plan(((*actions[:to], program[index], *actions[to:]),))


def test_no_action_on_shards_can_move_past_what_needs_it():
    reads = {Op.FREE_PARAM: {Op.FORWARD}, Op.FREE_PARAM_B: {Op.BACKWARD}}
    (program,) = verified(planned(aiao(1, 4), **BOTH)).programs
    tried = 0
    for index, (stage, op, _) in enumerate(program):
        own = [i for i, a in enumerate(program) if a.stage == stage and i != index]
        if op in reads:  # before the last computation that reads the parameters
            to = max(i for i in own if i < index and program[i].op in reads[op])
        elif op in GATHER_OPS:  # behind the first one
            to = min(i for i in own if i > index and program[i].op in COMPUTE_OPS)
        elif op is Op.FREE_GRAD:
            to = max(i for i in own if i < index and program[i].op is Op.REDUCE_SCATTER)
        else:
            continue
        tried += 1
        with pytest.raises(PlanError, match="waits at"):
            verify(_moved(program, index, to))
    assert tried == 4 + 2 + 4 + 2 + 2  # all-gathers, frees, and frees of gradients

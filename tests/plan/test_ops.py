"""The table of ops: complete, and in the words of those who read it."""

from dataclasses import fields

import pytest

from megatron.fold3d.observe.report.page import for_scripts
from megatron.fold3d.observe.report.palette import HUES
from megatron.fold3d.plan.ir import Action
from megatron.fold3d.plan.ops import TABLE, Op, OpScope, Place
from megatron.fold3d.predict.simulator.costs import Costs


@pytest.mark.parametrize("op", Op)
def test_an_op_has_one_row_that_every_reader_understands(op: Op):
    row = TABLE[op]
    assert row.kind == "" or row.kind in HUES
    assert row.cost == "" or row.cost in {field.name for field in fields(Costs)}
    assert bool(row.kind) == (row.place not in (Place.HOST, Place.UPDATE))
    assert for_scripts()[op.rstrip(":")]["kind"] == row.kind


@pytest.mark.parametrize("scope", OpScope)
def test_the_example_of_a_scope_has_that_scope(scope: OpScope):
    action = Action.from_str(scope.value)
    assert TABLE[action.op].scope is scope
    assert str(action) == scope.value

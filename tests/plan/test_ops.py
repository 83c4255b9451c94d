"""The table of ops: complete, and in the words of those who read it."""

from dataclasses import fields

import pytest

from megatron.fold3d.observe.report.palette import HUES
from megatron.fold3d.plan.ir import Action
from megatron.fold3d.plan.ops import TABLE, Op, OpScope, Place, awaited, for_pages
from megatron.fold3d.predict.simulator.costs import Costs


@pytest.mark.parametrize("op", Op)
def test_an_op_has_one_row_that_every_reader_understands(op: Op):
    row = TABLE[op]
    assert row.kind == "" or row.kind in HUES
    assert row.cost == "" or row.cost in {field.name for field in fields(Costs)}
    assert bool(row.kind) == (row.place not in (Place.HOST, Place.WAIT))
    if row.place is Place.WAIT:  # and what it waits for comes first
        assert TABLE[awaited(op) or op].place is Place.DP_SYNC
    else:
        assert awaited(op) is None
    assert op.rstrip(".:") in for_pages()


@pytest.mark.parametrize("scope", OpScope)
def test_the_example_of_a_scope_has_that_scope(scope: OpScope):
    action = Action.from_str(scope.value)
    assert TABLE[action.op].scope is scope
    assert str(action) == scope.value

"""Our compute orders beside those of torch and of Megatron, wherever they name the same thing."""

import csv
import io
from collections.abc import Iterable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

from megatron.fold3d.plan.files import parse_plan
from megatron.fold3d.plan.ir import Action, Op, PlanError
from megatron.fold3d.plan.passes.combined import one_more_ahead
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.plan.verify import verify
from tests.plans import built

SIZES = [(p, v, m) for p in (2, 3, 4) for v in (1, 2, 3) for m in (1, 2, 4, 5, 8, 12)]


def ours(schedule: str, p: int, v: int, m: int, group_size: int | None = None) -> list[list[str]]:
    plan = built(schedule, p, v, m, group_size=group_size)
    return list(plan.to_rows())


def stages(p: int, v: int) -> list[SimpleNamespace]:
    """What a schedule of torch asks its stages before it orders them."""
    sizes = {"num_stages": p * v, "group_size": p, "group_rank": 0, "has_backward": True}
    return [SimpleNamespace(stage_index=i, submod=torch.nn.Module(), **sizes) for i in range(v)]


def torchs(pipeline_order: dict[int, Iterable[object]]) -> list[list[str]]:
    """Torch's order without its idle slots and its gradient sync."""
    words = ([str(action) for action in row if action] for row in pipeline_order.values())
    return [[word for word in row if not word.endswith("REDUCE_GRAD")] for row in words]


@pytest.mark.parametrize(("p", "v", "m"), [size for size in SIZES if size[1] == 1])
def test_afab_on_one_segment_is_torchs_gpipe(p: int, v: int, m: int):
    try:
        schedule = ScheduleGPipe(stages(p, v)[0], m)
    except ValueError as refused:
        assert m < p
        pytest.skip(f"this torch: {refused}")
    assert ours("afab", p, v, m) == torchs(schedule.pipeline_order)


@pytest.mark.parametrize(("p", "v", "m"), [size for size in SIZES if size[1] == 1])
def test_1f1b_is_torchs(p: int, v: int, m: int):
    if m < p:
        with pytest.raises(ValueError, match="greater than or equal to the number of stages"):
            Schedule1F1B(stages(p, v)[0], m)
        return
    *rows, last = torchs(Schedule1F1B(stages(p, v)[0], m).pipeline_order)
    *our_rows, our_last = ours("1f1b", p, v, m)
    assert our_rows == rows
    # Torch 2.13 counts the forwards of the last rank from 1 in this listing; it runs them from 0.
    assert [word[0] for word in map(Action.from_str, last)] == [p - 1] * 2 * m
    assert [word for word in our_last if "B" in word] == [word for word in last if "B" in word]
    assert [word for word in last if "F" in word] == [f"{p - 1}F{i}" for i in range(1, m + 1)]
    assert ["F" in word for word in our_last] == ["F" in word for word in last]


@pytest.mark.parametrize(("p", "v", "m"), SIZES)
def test_interleaved_is_torchs(p, v, m):
    # Torch spreads a remainder over the groups as ours does, but wants it to come out even.
    num_groups = max(1, m // p)
    if m % num_groups:
        with pytest.raises(ValueError, match="multiple of the number of rounds"):
            ScheduleInterleaved1F1B(stages(p, v), m)
        return
    schedule = ScheduleInterleaved1F1B(stages(p, v), m)
    assert ours("interleaved", p, v, m) == torchs(schedule.pipeline_order)


@pytest.mark.parametrize(("p", "v", "m"), SIZES)
def test_afab_is_torchs_looped_breadth_first_but_for_the_order_of_backwards(p: int, v: int, m: int):
    def last_in_first_out(word: str) -> str:
        stage, op, microbatch = Action.from_str(word)
        assert microbatch is not None
        return str(Action(stage, op, m - 1 - microbatch if op is Op.BACKWARD else microbatch))

    rows = torchs(ScheduleLoopedBFS(stages(p, v), m).pipeline_order)
    assert [list(map(last_in_first_out, row)) for row in ours("afab", p, v, m)] == rows


def dumped(schedule: object, order: str) -> bytes:
    """A table of torch's, as its schedules dump it."""
    if not hasattr(schedule, order):
        pytest.skip(f"this torch's {type(schedule).__name__} has no {order}")
    table = io.StringIO()
    csv.writer(table).writerows(getattr(schedule, order).values())
    return table.getvalue().encode()


@pytest.mark.parametrize("order", ["pipeline_order", "pipeline_order_with_comms"])
@pytest.mark.parametrize("schedule", [ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble])
@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (3, 2, 6)])
def test_a_table_that_torch_dumps_is_a_plan_that_can_run(schedule: type, p, v, m, order: str):
    plan = parse_plan(dumped(schedule(stages(p, v), m), order))
    verify(plan)
    assert (plan.num_ranks, plan.num_segments, plan.num_microbatches) == (p, v, m)
    assert plan.has(Op.WEIGHT) == (schedule is ScheduleInterleavedZeroBubble)
    assert [program[-1].op for program in plan.programs if plan.has(Op.ALL_REDUCE)] == [Op.STEP] * (
        p if "comms" in order else 0
    )


def test_words_of_torch_have_ours():
    table = (
        "0UNSHARD,0F0,0F1,0I0,0W0,0B1,0REDUCE_GRAD,0RESHARD\n,(1F0;1I0)OVERLAP_F_B,1F1,1I1,1W0,1W1"
    )
    plan = parse_plan(f"{table},1REDUCE_GRAD\n".encode())
    assert plan.to_text() == (
        "0F0 0F1 0B0 0W0 0B1 0W1 0ALL_REDUCE 0STEP\n1F0 1B0 1F1 1B1 1W0 1W1 1ALL_REDUCE 1STEP\n"
    )
    verify(plan)


@pytest.mark.parametrize("order", ["pipeline_order", "pipeline_order_with_comms"])
@pytest.mark.parametrize("schedule", [ScheduleZBVZeroBubble, ScheduleDualPipeV])
@pytest.mark.parametrize("p", [2, 4])
def test_a_table_with_stages_in_a_v_is_refused(schedule: type, p: int, order: str):
    in_v = stages(p, 2)
    in_v[1].stage_index = 2 * p - 1
    table = dumped(schedule(in_v, 2 * p), order)
    with pytest.raises(PlanError, match=r"placed in a V .* not supported, stage s is on rank s %"):
        verify(parse_plan(table))


def megatrons(
    p: int, v: int, m: int, group_size: int, *, combined: bool = False
) -> list[list[str]]:
    """Megatron's interleaved order, from the table and the warm-up that its schedule reads."""
    from megatron.core.pipeline_parallel.schedules import (
        get_pp_rank_microbatches,
        get_schedule_table,
    )

    table = get_schedule_table(m, v, group_size)
    rows = []
    for rank in range(p):
        group = SimpleNamespace(size=lambda: p, rank=lambda rank=rank: rank)
        communicator = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=v)
        total, _, ahead, remaining = get_pp_rank_microbatches(
            m,
            v,
            group_size,
            overlap_moe_expert_parallel_comm=combined,
            p2p_communicator=communicator,
        )
        forwards = [f"{chunk * p + rank}F{i}" for i, chunk in table]
        backwards = [f"{(v - 1 - chunk) * p + rank}B{i}" for i, chunk in table]
        assert total == len(table)
        row = forwards[:ahead]
        for k in range(remaining):  # one forward, then one backward
            row += [forwards[ahead + k], backwards[k]]
        rows.append(row + backwards[remaining:])
    return rows


def accepted_by_megatron(sizes: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Sizes with the groups that Megatron runs; interleaving starts at two segments."""
    return [
        (p, v, m, group_size)
        for p, v, m in sizes
        if v > 1
        for group_size in range(p, m + 1)
        if not 0 < m % group_size < p
    ]


@pytest.mark.parametrize(("p", "v", "m", "group_size"), accepted_by_megatron(SIZES))
def test_interleaved_is_megatrons(p: int, v: int, m: int, group_size: int):
    assert ours("interleaved", p, v, m, group_size) == megatrons(p, v, m, group_size)
    sizes = {"num_ranks": p, "num_segments": v, "num_microbatches": m, "group_size": group_size}
    later = one_more_ahead(build("interleaved", **sizes))
    expected = megatrons(p, v, m, group_size, combined=True)
    assert [[str(action) for action in program] for program in later.programs] == expected


@pytest.mark.parametrize("schedule", ["breadth-first", "aiao"])
@pytest.mark.parametrize(("p", "v", "m"), [size for size in SIZES if size[1] > 1])
def test_aiao_with_a_1f1b_tail_is_megatrons_with_one_group(schedule, p, v, m):
    # Megatron itself refuses m < p here; its tables do not.
    assert ours(schedule, p, v, m) == megatrons(p, v, m, m)

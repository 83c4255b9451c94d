from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fold3d.observe.exposure import exposure
from megatron.fold3d.observe.timeline import Lane, Span, Timeline
from megatron.fold3d.observe.trace_files import (
    Event,
    IterationTrace,
    RankTrace,
    pipeline,
    read_ranks,
)
from megatron.fold3d.observe.trace_timeline import to_timeline
from megatron.fold3d.plan.ir import Action


def rank(number: int, *events: Event, start_s: float = 1e9) -> RankTrace:
    """One iteration of one of two pipeline ranks, which may be off by its clock."""
    row = IterationTrace(
        iteration=4,
        start_s=start_s,
        end_s=9.0,
        events=events,
        gpu_memory_bytes=None,
        host_memory_bytes=1 << 20,
    )
    return RankTrace(
        rank=number,
        pp_rank=number,
        dp_rank=0,
        tp_rank=0,
        num_ranks=2,
        num_segments=1,
        num_microbatches=1,
        schedule="1f1b",
        plan="",
        iterations=(row,),
    )


FIRST = rank(
    0,
    Event("0F0", 0.0, 1.0, "compute"),
    Event("0SEND_F0", 1.0, 1.0, "p2p"),
    Event("0RECV_B0", 1.0, 5.0, "p2p"),
    Event("wait 0RECV_B0", 1.0, 5.0, "wait"),
    Event("0B0", 5.0, 7.0, "compute"),
    Event("0ALL_REDUCE", 7.0, 8.5, "grad_sync"),
    Event("wait 0ALL_REDUCE", 7.0, 8.0, "wait"),
    Event("optimizer", 8.0, 9.0, "optimizer"),
)
SECOND = rank(
    1,
    Event("1RECV_F0", 0.0, 1.5, "p2p"),
    Event("wait 1RECV_F0", 0.0, 1.5, "wait"),
    Event("1F0", 1.5, 2.5, "compute"),
    Event("1B0", 2.5, 4.5, "compute"),
    Event("1SEND_B0", 4.5, 4.5, "p2p"),
)


def spans(timeline: Timeline, number: int, lane: Lane) -> list[tuple[str, float, float]]:
    return [(str(s.action or ""), s.start_s, s.end_s) for s in timeline.lane(number, lane)]


def without_p2p(trace: RankTrace) -> RankTrace:
    (row,) = trace.iterations
    events = tuple(event for event in row.events if event.kind != "p2p")
    return replace(trace, iterations=(replace(row, events=events),))


def test_a_message_is_under_way_from_the_senders_departure_to_the_receivers_arrival():
    timeline = to_timeline([FIRST, SECOND])
    assert spans(timeline, 1, Lane.P2P) == [("1RECV_F0", 1.0, 1.5)]
    assert spans(timeline, 0, Lane.P2P) == [("0RECV_B0", 4.5, 5.0)]


def test_without_a_record_of_messages_they_last_from_computation_to_computation():
    timeline = to_timeline([without_p2p(FIRST), without_p2p(SECOND)])
    assert timeline == to_timeline([FIRST, SECOND])


def test_every_second_is_accounted_for():
    first, second = exposure(to_timeline([FIRST, SECOND]))
    assert (first.forward_s, first.backward_s, first.optimizer_s) == (1.0, 2.0, 1.0)
    assert (first.p2p_s, first.grad_sync_s, first.bubble_s) == (0.5, 1.0, 3.5)
    assert second.p2p_s == 0.5
    assert first.total_s == second.total_s == 9.0


@pytest.mark.parametrize("off_s", [-2.0, 2.0])
def test_a_clock_by_which_messages_arrive_before_they_left_is_moved(off_s: float):
    off = rank(1, *SECOND.iterations[0].events, start_s=1e9 + off_s)
    timeline = to_timeline([FIRST, off])
    for number in (0, 1):
        assert all(span.duration_s >= 0 for span in timeline.lane(number, Lane.P2P))
    (forward, _) = spans(timeline, 1, Lane.COMPUTE)
    assert 1.0 <= forward[1] <= 2.0


def test_a_span_nested_in_another_interrupts_it():
    step = rank(
        0,
        Event("wait 0ALL_REDUCE", 0.0, 3.0, "wait"),
        Event("0STEP", 1.0, 2.5, "optimizer"),
        Event("0F0", 3.0, 5.0, "compute"),
        Event("wait 0ALL_GATHER", 3.5, 4.0, "wait"),
    )
    timeline = to_timeline([step, SECOND])
    assert spans(timeline, 0, Lane.COMPUTE) == [("0F0", 3.0, 3.5), ("0F0", 4.0, 5.0)]
    assert spans(timeline, 0, Lane.WAIT) == [
        ("0ALL_REDUCE", 0.0, 1.0),
        ("0ALL_REDUCE", 2.5, 3.0),
        ("0ALL_GATHER", 3.5, 4.0),
    ]


def test_two_micro_batches_that_ran_as_a_pair_share_its_time():
    events = (
        Event("0F0", 0.0, 3.5, "compute"),
        Event("0F1", 0.5, 4.0, "compute"),
        Event("0B0", 4.0, 6.0, "compute"),
    )
    alone = rank(0, *events)
    timeline = to_timeline([replace(alone, num_ranks=1)])
    expected = [("0F0", 0.0, 2.0), ("0F1", 2.0, 4.0), ("0B0", 4.0, 6.0)]
    assert spans(timeline, 0, Lane.COMPUTE) == expected


def test_only_iterations_that_all_ranks_recorded_count_from_zero():
    (row,) = FIRST.iterations
    longer = replace(FIRST, iterations=(replace(row, iteration=3, start_s=row.start_s - 9), row))
    timeline = to_timeline([longer, SECOND])
    assert timeline == to_timeline([FIRST, SECOND])
    assert Span(Lane.COMPUTE, 0.0, 1.0, Action.from_str("0F0"), 0) in timeline.ranks[0]


def test_a_folder_is_read_as_it_was_written(tmp_path: Path):
    for trace in (FIRST, SECOND):
        (tmp_path / trace.file_name).write_text(trace.to_json())
    assert read_ranks(tmp_path) == (FIRST, SECOND)
    assert to_timeline(pipeline(read_ranks(tmp_path))) == to_timeline([FIRST, SECOND])


def test_each_pipeline_of_several_is_found():
    replica = [replace(trace, rank=trace.rank + 2, dp_rank=1) for trace in (FIRST, SECOND)]
    ranks = [FIRST, *replica, SECOND]
    assert pipeline(ranks) == (FIRST, SECOND)
    assert pipeline(ranks, 1) == tuple(replica)


def test_iterations_that_not_all_ranks_recorded_are_no_timeline():
    with pytest.raises(ValueError, match="no iteration that all ranks recorded"):
        to_timeline([FIRST, replace(SECOND, iterations=())])

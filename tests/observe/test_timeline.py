from megatron.fold3d.observe.timeline import Lane, Span, Timeline, queued
from megatron.fold3d.plan.ir import Action

F0, B0, REDUCE, STEP = map(Action.from_str, ("0F0", "0B0", "0ALL_REDUCE:600", "0STEP"))


def timeline() -> Timeline:
    return Timeline.of(
        [
            [
                Span(Lane.COMPUTE, 2.0, 4.0, B0),
                Span(Lane.COMPUTE, 0.0, 1.0, F0),
                Span(Lane.GRAD_SYNC, 4.0, 6.0, REDUCE),
                Span(Lane.WAIT, 4.5, 5.0, None),
                Span(Lane.COMPUTE, 6.0, 7.0, F0, 1),
                Span(Lane.COMPUTE, 7.0, 9.0, B0, 1),
            ]
        ]
    )


def test_spans_are_in_the_order_of_their_start():
    starts = [span.start_s for span in timeline().ranks[0]]
    assert starts == sorted(starts)


def test_iterations_end_with_what_occupies_the_rank_not_with_grad_sync():
    assert timeline().iteration_ends_s(0) == (5.0, 9.0)
    assert timeline().period_s == 4.0
    assert timeline().makespan_s == 9.0


def test_a_window_cuts_spans_and_starts_at_zero():
    window = timeline().between(3.0, 6.0)
    assert [(s.lane, s.start_s, s.end_s) for s in window.ranks[0]] == [
        (Lane.COMPUTE, 0.0, 1.0),
        (Lane.GRAD_SYNC, 1.0, 3.0),
        (Lane.WAIT, 1.5, 2.0),
    ]


def test_a_rank_without_work_has_no_time_and_leaves_the_period_to_the_others():
    assert Timeline(()).makespan_s == 0.0
    assert Timeline(((),)).period_s == 0.0
    assert Timeline((*timeline().ranks, ())).period_s == 4.0


def test_collectives_of_one_launch_are_shown_as_the_network_serves_them():
    def sync(start_s: float, end_s: float) -> Span:
        return Span(Lane.GRAD_SYNC, start_s, end_s)

    launched = [sync(0, 3), sync(0, 1), sync(2, 5), sync(7, 8)]
    assert queued(launched) == [sync(0, 1), sync(1, 3), sync(3, 5), sync(7, 8)]


def test_a_span_has_a_word_for_what_the_rank_does():
    spans = [Span(lane, 0, 1, REDUCE) for lane in (Lane.GRAD_SYNC, Lane.WAIT)]
    spans += [Span(Lane.OPTIMIZER, 0, 1, STEP), Span(Lane.WAIT, 0, 1), Span(Lane.TP_SYNC, 0, 1)]
    words = ["0ALL_REDUCE:600", "wait 0ALL_REDUCE:600", "optimizer 0", "wait", "tp_sync"]
    assert [span.word for span in spans] == words

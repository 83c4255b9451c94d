"""Choices: what a word says of a number of segments, and the word that says it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fold3d.plan.choice import Choice, Segment
from megatron.fold3d.plan.schedule_word import ORDERS


@st.composite
def choices(draw: st.DrawFn) -> Choice:
    step = draw(st.sampled_from(("end", "next")))
    segments = st.builds(
        Segment,
        optimizer=st.sampled_from(("sharded", "replicated")),
        step=st.just(step),
        wgrad=st.sampled_from(("backward", "behind", "last")),
        recompute=st.sampled_from(("late", "early")),
    )
    choice = Choice(
        draw(st.sampled_from((*ORDERS, "plan=out/my plan.txt"))),
        tuple(draw(st.lists(segments, min_size=1, max_size=9))),
        group=draw(st.none() | st.integers(1, 99)),
        ahead=draw(st.none() | st.integers(1, 9)),
        held=draw(st.none() | st.integers(1, 9)),
        share=draw(st.none() | st.sampled_from((0.0, 0.25, 1.0))),
        slices=draw(st.none() | st.booleans()),
        slice_bytes=draw(st.none() | st.integers(1, 99)),
        pairs=draw(st.none() | st.booleans()),
    )
    return choice.changed(wgrad="gaps") if draw(st.booleans()) else choice


@given(choices())
def test_str_and_parse_are_inverse(choice: Choice):
    assert Choice.parse(str(choice), len(choice.segments)) == choice


def test_parts_without_segments_are_for_all_of_them():
    assert str(Choice.parse("aiao:wgrad=behind@0-3:step=end", 4)) == "aiao:wgrad=behind"
    some = Choice.parse("aiao:optimizer=replicated@1:wgrad=behind@1,3:wgrad=last@0,2", 4)
    assert [segment.wgrad for segment in some.segments] == ["last", "behind", "last", "behind"]
    assert some.where(optimizer="replicated", wgrad="behind") == (1,)
    assert some.stages(2, wgrad="last") == (0, 1, 4, 5)


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("aiao:wgrad=last@4", "wgrad=last@4: there is no segment 4, a rank holds 4; give some of"),
        ("1f1b:ahead=auto", "ahead=auto: only a run or a simulation can choose; give a value"),
    ],
)
def test_what_a_number_of_segments_cannot_have_is_refused(word: str, problem: str):
    with pytest.raises(ValueError, match=problem):
        Choice.parse(word, 4)


def test_a_clipped_step_ends_with_its_iteration():
    choice = Choice.parse("aiao:step=next:wgrad=last@1:share=0.5", 2)
    assert str(choice.in_iteration()) == "aiao:wgrad=last@1"

"""The word of ``--schedule``: grammar, spelling, and what shells make of it."""

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fold3d.plan.schedule_word import _OF_SEGMENTS, ORDERS, VALUES, Part, Word, spelled

LONG = "interleaved:optimizer=replicated@1,3,6-8:step=next:wgrad=behind@0:wgrad=last@2:group=8"


@st.composite
def parts(draw: st.DrawFn, key: str) -> list[Part]:
    value = draw(st.sampled_from(VALUES[key]))
    value = {"<n>": str(draw(st.integers(-9, 99))), "<x>": "0.25"}.get(value, value)
    if (key, value) not in _OF_SEGMENTS or draw(st.booleans()):
        return [Part(key, value)]
    segments = draw(st.sets(st.integers(0, 12), min_size=1))
    return [Part(key, value, tuple(sorted(segments)))]


@st.composite
def words(draw: st.DrawFn) -> Word:
    order = draw(st.sampled_from((*ORDERS, "plan=out/my plan.txt")))
    keys = sorted(draw(st.sets(st.sampled_from([*VALUES]))), key=[*VALUES].index)
    return Word(order, tuple(part for key in keys for part in draw(parts(key))))


@given(words())
def test_str_and_parse_are_inverse(word: Word):
    assert Word.parse(str(word)) == word


def test_parts_may_be_given_in_any_order():
    assert str(Word.parse("aiao:share=0.5:wgrad=last@3,1,2:step=next")) == (
        "aiao:step=next:wgrad=last@1-3:share=0.5"
    )
    assert Word.parse(LONG).value("group") == "8"
    assert Word.parse("aiao").value("step") is None


def test_runs_of_segments_are_spelled_from_three_on():
    assert spelled((0, 1, 3, 4, 5, 9)) == "0,1,3-5,9"


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("gpipe", "'gpipe' is no order; give stock, auto, aiao, .*, or plan=FILE"),
        ("plan=", "'plan=' is no order"),
        ("", "'' is no order"),
        ("aiao:steps=next", "'steps=next': there is no key 'steps'; give one of optimizer, step"),
        ("aiao:", "'': there is no key ''"),
        ("aiao:step=late", "'step=late': step has no value 'late'; give end or next"),
        ("aiao:ahead=two", "'ahead=two': ahead has no value 'two'; give a number or auto"),
        ("aiao:ahead=<n>", "ahead has no value '<n>'"),
        ("aiao:step=next@1", "'step=next@1': step=next is for all segments; drop @1"),
        ("aiao:wgrad=last@", "'' are no segments; give them as 1,3,6-8"),
        ("aiao:wgrad=last@1,1", "'1,1' names a segment twice or none; give each once"),
        ("aiao:wgrad=last@4-2", "'4-2' names a segment twice or none"),
        ("aiao:step=next:step=end", "step=end and step=next: a segment has one value of step"),
        ("aiao:wgrad=last:wgrad=behind@1", "a segment has one value of wgrad; drop one"),
        ("aiao:wgrad=last@1,2:wgrad=behind@2", "a segment has one value of wgrad; drop one"),
    ],
)
def test_what_is_no_word_is_refused_in_a_line(word: str, problem: str):
    with pytest.raises(ValueError, match=problem) as raised:
        Word.parse(word)
    assert "\n" not in str(raised.value)


@pytest.mark.processes
def test_no_shell_cuts_or_expands_a_word():
    script = """
        set -e
        flags=(--schedule WORD)
        printf '%s\\n' ${flags[@]}
        bash -c "printf '%s\\n' ${flags[*]}"
        sh -c "printf '%s\\n' ${flags[*]}"
        text="${flags[*]}"; eval "printf '%s\\n' $text"
    """.replace("WORD", LONG)
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stdout.split() == ["--schedule", LONG] * 4

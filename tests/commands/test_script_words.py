"""What a shell script's words are, without running it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fold3d.commands.script_words import reasons_of, script_words

MOE_LOOP = """\
arr=()
for ((i=0; i<LAYERS; i++)); do
  if (( i < DENSE )); then arr+=(0); else arr+=(1); fi
done
printf -v FREQ "[%s]" "$(IFS=', '; echo "${arr[*]}")"
ARGS=(
  --num-layers 4 # which the maker's file has
  --moe-layer-freq $FREQ
)
"""
BRANCHES = """\
if [ "$SIZE" = 7B ]; then L=32; elif [[ $SIZE == 13B && -n "$L" ]]; then L=40; else L=1; fi
"""
UNDECIDED = 'A="--b 2"; if [ -n "$FOO" ]; then A="$A --a 1"; L=4; fi; train $A --c $L --d 3'


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("A=2\nB=3\ntrain --n $((A + B*2)) --m \"$(( (A+$B) % 4 ))\"", "train --n 8 --m 1"),
        ("A=-7; train --n $((A / 2)) --m $((7 / 2))", "train --n -3 --m 3"),
        ("A=(--a 1); A+=(--b '2 3'); train \"${A[@]}\"", "train --a 1 --b 2 3"),
        ('A="--a 1"; A+=" --b"; train $A', "train --a 1 --b"),
        ('A="\n --a 1\n --b"\ntrain $A', "train --a 1 --b"),
        ('train --a ${X:-4} --b ${X:-"5"} --c ${X:+6}', "train --a 4 --b 5 --c"),
        (': "${X:=4}" ${Y=5}\ntrain --a ${X:=6} --b $Y', "train --a 4 --b 5"),
        ("train --a `date`", "train --a $(date...)"),
        (f"SIZE=7B\n{BRANCHES}train --n $L", "train --n 32"),
        (f"SIZE=13B L=9\n{BRANCHES}train --n $L", "train --n 40"),
        (f"SIZE=8B\n{BRANCHES}train --n $L", "train --n 1"),
        ("S=8B\ncase $S in 7B|8B) L=2;; *) L=3;; esac\ntrain --n $L", "train --n 2"),
        ("S=1\n[ $S -gt 1 ] && L=2 || L=3\n(( S == 1 )) || L=4\ntrain --n $L", "train --n 3"),
        ("L=2\nwhile [[ $# -gt 0 ]]; do L=$2; shift; done\ntrain --n $L $@", "train --n 2"),
        ("for i in 1 2; do L=3; train --n $L --m $i; done", "train --n 3 --m $i"),
        ("cat <<EOF\nit's\nEOF\nbash -c 'a --n 4' 2>&1 > log && echo 1", "bash -c a --n 4"),
        ("export A=1 && f() { train --n $A; }\n# don't\nf", "train --n 1"),
        (MOE_LOOP, "--num-layers 4 --moe-layer-freq $FREQ"),
        ('train --a "unclosed', "train --a unclosed"),
    ],
)  # fmt: skip
def test_what_can_be_evaluated_is(script: str, words: str):
    assert " ".join(script_words(script).words) == words


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (MOE_LOOP, "$FREQ: printf sets it"),
        ("for i in 1 2; do A=$i; done; train --n $A", "$i: a loop sets it"),
        ("train --n $A", "the script gives it no value"),
        ("train --n $((2 * A))", "$((2*A)): of A (the script gives it no value)"),
        ("A=$(nproc) && train --n $((2 * A))", "$(nproc...): a command prints it"),
        ("A=2 && train --n $((A ** 40))", "$((A**40)): only + - * / % of integers are evaluated"),
        ("A=0 && train --n $((4 / A))", "$((4/A)): only + - * / % of integers are evaluated"),
        ("A=ab && train --n ${A:0:1}", "${A:0:1}: the form of this expansion is not evaluated"),
    ],
)
def test_what_cannot_be_evaluated_has_a_reason(script: str, reason: str):
    read = script_words(script)
    assert reason in reasons_of(read.words[-1], read.reasons)


def test_flags_from_branches_that_are_not_decided_are_named():
    read = script_words(UNDECIDED)
    assert " ".join(read.words) == "train --b 2 --a 1 --c 4 --d 3"
    assert read.undecided == ("--a", "--c")
    both = script_words('if [ -n "$FOO" ]; then L=4; else L=4; fi; train --n $L')
    assert (both.words[-1], both.undecided) == ("4", ())


KEYWORDS = (
    *("if", "then", "elif", "else", "fi", "case", "in", "esac", "for", "do", "done", "[[", "]]"),
)


@given(
    st.lists(st.sampled_from([*"$(){}'\"`\\ \n;&|#<=[]A1-", *(f" {word} " for word in KEYWORDS)]))
)
def test_any_text_ends(parts: list[str]):
    script_words("".join(parts))

"""Flags of ours that were renamed are refused with the new spelling, each of them."""

from argparse import ArgumentParser

import pytest

from megatron.fold3d.config.all_flags import add_arguments
from megatron.fold3d.config.retired_flags import RETIRED

GIVEN = {
    "--plan-file": ("plan.txt", "--schedule plan=plan.txt"),
    "--aiao-last-segment": ("afab", "--schedule afab, or aiao"),
    "--forwards-ahead": ("3", ":ahead=3"),
    "--overlap-tensor-parallel": ("", ":pairs=on"),
    "--backward-share": ("auto", ":step=next"),
    "--dp-slices": ("on", ":slices=on"),
    "--dp-slice-bytes": ("4096", ":slice-bytes=4096"),
    "--delay-weight-grads": ("1,3", ":wgrad=last@1,3"),
    "--early-dp-sync": ("3", ":wgrad=behind@3"),
    "--most-activations": ("9", ":held=9"),
    "--from-flags": ("x", "the flags themselves, behind --"),
    "--group-size": ("8", "interleaved:group=8"),
    "--replicate-optimizer": ("0,2", ":optimizer=replicated@0,2"),
    "--recompute-early": ("0-3", ":recompute=early@"),
    "--pp-traffic-class": ("184", "--traffic-class pp=184"),
    "--dp-traffic-class": ("0", "--traffic-class dp=0"),
}


def test_each_is_known():
    assert GIVEN.keys() == RETIRED.keys()


@pytest.mark.parametrize("flag", GIVEN)
def test_an_old_flag_is_refused_with_its_new_spelling(
    parser: ArgumentParser, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    value, instead = GIVEN[flag]
    with pytest.raises(SystemExit) as ended:
        parser.parse_args([flag, *value.split()])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {flag}: there is no such flag any more; give " in last
    assert instead in last


def test_help_does_not_show_them() -> None:
    text = add_arguments(ArgumentParser()).format_help()
    assert "--schedule WORD" in text
    assert not [flag for flag in RETIRED if f"{flag} " in text]

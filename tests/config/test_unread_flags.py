"""The table of flags without effect is what a search of the installed sources finds."""

import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterable
from pathlib import Path

import megatron.training
import pytest

from megatron.fold3d.config.unread_flags import UNREAD, unread_flags
from megatron.fold3d.training import launch

MEGATRON = Path(megatron.training.__file__).parents[1]
OURS = Path(__file__).parents[2] / "megatron" / "fold3d"
ARGUMENTS = MEGATRON / "training" / "arguments.py"
# An attribute, a string, a keyword of a call: how code names what it reads.
READ = re.compile(r"\.(\w+)|[\"'](\w+)[\"']|[(,\s](\w+)=(?!=)")
READ_BY_PREFIX = "muon_"
# Named, but for a warning alone, or where the flag is refused without what would read it.
NAMED_ONLY = {"rampup_batch_size"}


def read_names(paths: Iterable[Path]) -> set[str]:
    """Names that the files read; a field of a dataclass, `name: type`, is none."""
    found = (READ.findall(path.read_text()) for path in paths)
    return {name for names in found for groups in names for name in groups if name}


def test_the_table_names_each_option_that_no_code_reads(parser: ArgumentParser) -> None:
    others = (p for p in MEGATRON.rglob("*.py") if p not in (ARGUMENTS, *OURS.rglob("*.py")))
    read = read_names([*others, *(p for p in OURS.rglob("*.py") if p.name != "unread_flags.py")])
    read |= set(re.findall(r"\bargs\.(\w+)", ARGUMENTS.read_text()))
    groups = [group for group in parser._action_groups if group.title != "FOLD3D"]
    unread = {
        flag
        for group in groups
        for action in group._group_actions
        for flag in action.option_strings
        if action.dest != "help"
        and not action.dest.startswith(READ_BY_PREFIX)
        and (action.dest not in read or action.dest in NAMED_ONLY)
    }
    assert unread - UNREAD == set(), "no code reads these"
    assert UNREAD - unread == set(), "some code reads these"


def test_a_flag_without_effect_gets_one_line() -> None:
    line = "--rampup-batch-size 2 2 8 --lr 1 --openai-gelu --head-lr-mult=2 --openai-gelu"
    nowhere = "Megatron 0.19.2 accepts it and reads it nowhere"
    assert [*unread_flags(line.split())] == [
        f"--rampup-batch-size: {nowhere}; use --step-batch-size-schedule",
        f"--openai-gelu: {nowhere}; drop it",
        f"--head-lr-mult: {nowhere}; drop it",
    ]


def test_a_run_prints_the_line(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py"])
    with pytest.raises(SystemExit):
        launch.train(["--openai-gelu", "--help"], "gpt")
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "warning: --" in line] == [
        f"pretrain_gpt.py: warning: {next(unread_flags(['--openai-gelu']))}"
    ]

"""docs/compatibility.md says "works" of what a comparison with stock runs, and of nothing else.

A comparison is a run of ours that a test in tests/end_to_end compares with stock, bit for bit. It
runs an option if it gives it another value than Megatron's default.
"""

import re
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from megatron.fold3d.plan.schedule_word import Word
from tests.end_to_end import (
    test_auto_schedule,
    test_backward_share,
    test_checkpoints,
    test_codes,
    test_equal_to_stock,
    test_measured_counts,
    test_offload,
    test_paired_experts,
    test_param_shards,
    test_replicated_optimizer,
    test_without_training,
)

CHECKED = (test_equal_to_stock, test_param_shards, test_replicated_optimizer)
"""Tables whose rows are traced: what starts is compared with the plan (`train_as_planned`)."""
TABLES = (
    *CHECKED,
    test_backward_share,
    test_codes,
    test_measured_counts,
    test_offload,
    test_paired_experts,
)
PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"
OPTION = re.compile(r"`(--[a-z0-9-]+[^`]*)`")
OURS = re.compile(r"`(--[a-z0-9-]+[^`]*|[a-z-]+=[^`]*)`")  # and parts of the word of --schedule
# A section about flags of ours names what was run beside them in a paragraph or a table.
SECTION = re.compile(r"^## With (`.+?)\n(.*?)(?=^## |\Z)", re.M | re.S)
RUN_BESIDE = re.compile(r"^Run beside .*?(?=^$)", re.M | re.S)
NO_STAR = re.compile(r"^\| (.*[^*]) \| .* \| .* \|$", re.M)  # with a star: never run


def comparisons() -> Iterator[tuple[str, Sequence[str]]]:
    """Yield the name and the command line of each run that is compared with stock."""
    for table in TABLES:
        name = f"{table.__name__.rpartition('.')[2]}.py"
        for row in table.ROWS:
            traced = ["--trace", "folder"] if table in CHECKED else []
            yield f"{name}: {row}", [*row.command(row.ours), *traced]
    folder, saving = Path("folder"), test_checkpoints.saving
    gradients, knows = test_checkpoints.SAVES_GRADIENTS, test_checkpoints.KNOWS_ITS_SIZES
    for row, saves, resumes in (*test_checkpoints.CASES, (gradients, test_checkpoints.AIAO, "")):
        yield f"test_checkpoints.py: {row}", saving(row, saves, folder)
        if resumes:
            yield f"test_checkpoints.py: {row}", test_checkpoints.resuming(row, resumes, folder)
    yield f"test_checkpoints.py: {knows}", test_checkpoints.without_sizes(knows, folder)
    for row in test_without_training.ROWS:
        yield f"test_without_training.py: {row}", row.command(f"{row.ours} --skip-train")
    for chosen in (*(row for row, _ in test_auto_schedule.CASES), test_auto_schedule.WHOLE):
        yield f"test_auto_schedule.py: {chosen}", chosen.command(chosen.ours)


@dataclass(frozen=True, slots=True)
class Run:
    """A comparison, and the options that it runs."""

    name: str
    line: str
    options: frozenset[str]
    word: Word

    def has(self, words: str) -> bool:
        """Whether it runs an option, with a value if ``words`` has one, or a part of the word."""
        if not words.startswith("--"):
            return any(str(part).startswith(words) for part in self.word.parts)
        if words.startswith("--schedule "):
            return words.split()[1] == self.word.order
        return words.split()[0] in self.options and f" {words} " in f" {self.line} "


@pytest.fixture(scope="module")
def runs(parser: ArgumentParser) -> list[Run]:
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    found = []
    for name, words in comparisons():
        args = parser.parse_args(list(words))
        given = {word for word in words if word in actions}
        options = {f for f in given if getattr(args, actions[f].dest) != actions[f].default}
        last = [word for flag, word in pairwise(words) if flag == "--schedule"][-1:]
        scheduled = Word.parse(*last or ["stock"])
        found.append(Run(name, " ".join(words), frozenset(options), scheduled))
    return found


@cache
def page() -> str:
    return PAGE.read_text()


def documented() -> set[str]:
    """The options that the page says work: rows of its table, and what follows the table."""
    rows = re.findall(r"^\| (`--[^|]*) \| works \|", page(), re.M)
    (others,) = re.findall(r"^The same comparisons also give .*?(?=^$)", page(), re.M | re.S)
    return set(OPTION.findall(" ".join([*rows, others])))


def test_what_works_is_run(runs: list[Run]) -> None:
    unproven = sorted(f for f in documented() if not any(run.has(f) for run in runs))
    assert not unproven, (
        f"docs/compatibility.md says that {', '.join(unproven)} works, and no comparison with "
        "stock runs it: add a row to tests/end_to_end/test_equal_to_stock.py, or write `never run`"
    )


def test_what_is_run_is_documented(parser: ArgumentParser, runs: list[Run]) -> None:
    (group,) = (g for g in parser._action_groups if g.title == "FOLD3D")
    ours = {flag for action in group._group_actions for flag in action.option_strings}
    unknown = {f: run.name for run in runs for f in run.options - documented() - ours}
    assert not unknown, "docs/compatibility.md does not say that these work, which rows run: " + (
        "; ".join(f"{flag} in {name}" for flag, name in sorted(unknown.items()))
    )


def claims() -> Iterator[tuple[str, str]]:
    """Yield each flag of ours that has a section, with each option that was run beside it."""
    for heading, text in SECTION.findall(page()):
        beside = OURS.findall(" ".join(RUN_BESIDE.findall(text) + NO_STAR.findall(text)))
        assert beside, f"docs/compatibility.md does not say what was run beside {heading}"
        yield from ((flag, words) for flag in OURS.findall(heading) for words in beside)


def test_what_works_beside_a_flag_of_ours_is_run_beside_it(runs: list[Run]) -> None:
    unproven = sorted(
        f"{words} beside {flag}"
        for flag, words in set(claims())
        if not any(run.has(words) and run.has(flag) for run in runs)
    )
    assert not unproven, (
        f"docs/compatibility.md says that this was run: {', '.join(unproven)}; no comparison with "
        "stock gives both: add a row to a test in tests/end_to_end, or say `never run`"
    )

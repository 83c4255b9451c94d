"""The worked examples of CONTRIBUTING.md are in the source as shown, and work when put back."""

import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.programs import ROOT, ran

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
HEADINGS = ("A flag", "A patch", "An op")
# Shows, without torch or Megatron, that the example is there.
WORKS = {
    "A flag": """
from argparse import ArgumentParser
from megatron.fold3d.config.all_flags import add_arguments
from megatron.fold3d.plan.choice import Choice
parser = add_arguments(ArgumentParser())
word = parser.parse_args(["--schedule", "1f1b:wgrad=gaps:held=3"]).schedule
assert Choice.parse(word, 1).held == 3
""",
    "A patch": """
from fold3d_patches import compile_helpers
assert compile_helpers.unless_built.target == "megatron.core.datasets.utils:compile_helpers"
""",
    "An op": """
from megatron.fold3d.plan.compile import Job, lower
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.simulate import simulate
order = build("aiao", num_ranks=1, num_segments=2, num_microbatches=2)
plan = lower(Job.of(order, gathers_params=True))
costs = dict(forward_s=(1.0, 1.0), backward_s=(2.0, 2.0))
makespans = [
    simulate(plan, Costs(**costs, param_gather_s=(seconds,) * 2)).makespan_s for seconds in (0, 5)
]
assert makespans[0] < makespans[1]
""",
}


@dataclass(frozen=True, slots=True)
class Hunk:
    """Lines of a file, before the example and with it; no file before is None."""

    path: str
    before: str | None
    after: str


def hunks(heading: str) -> Iterator[Hunk]:
    """Yield the hunks of all diffs below a heading."""
    (section,) = re.findall(rf"^### {heading}\n(.*?)(?=^### |\Z)", PAGE, re.M | re.S)
    for diff in re.findall(r"^```diff\n(.*?)^```$", section, re.M | re.S):
        parts = re.findall(
            r"^(--- /dev/null\n)?\+\+\+ (\S+)\n(.*?)(?=^--- /|^\+\+\+ |\Z)", diff, re.M | re.S
        )
        for new, path, body in parts:
            for lines in [body] if new else re.split(r"^@@\n", body, flags=re.M)[1:]:
                yield Hunk(path, None if new else side(lines, "-"), side(lines, "+"))


def side(lines: str, sign: str) -> str:
    """Return one side of a hunk: context, and the lines with a sign."""
    return "".join(line[1:] for line in lines.splitlines(keepends=True) if line[0] in (" ", sign))


def replace(folder: Path, path: str, found: str | None, by: str | None) -> None:
    """Put lines of a file in the place of others, which occur once; None is no file."""
    file = folder / path
    text = "" if found is None else file.read_text()
    if found is None:
        assert not file.exists()
    else:
        assert f"\n{text}".count(f"\n{found}") == 1, f"{path} has this not once:\n{found}"
    if by is None:
        assert text == found, f"{path} has more than this:\n{found}"
        file.unlink()
    else:
        file.write_text(f"\n{text}".replace(f"\n{found or ''}", f"\n{by}")[1:])


@pytest.mark.parametrize("heading", [*HEADINGS, "The handler of an op"])
def test_a_worked_example_is_in_the_source_as_shown(heading: str):
    shown = list(hunks(heading))
    assert shown
    for hunk in shown:
        text = (ROOT / hunk.path).read_text()
        assert f"\n{text}".count(f"\n{hunk.after}") == 1, f"{hunk.path} has not:\n{hunk.after}"


@pytest.mark.processes
@pytest.mark.parametrize("heading", HEADINGS)
def test_a_worked_example_works_once_it_is_put_back(heading: str, tmp_path: Path):
    shown: Sequence[Hunk] = list(hunks(heading))
    for folder in ("megatron", "fold3d_patches"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for path in {hunk.path for hunk in shown}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    for hunk in reversed(shown):
        replace(tmp_path, hunk.path, hunk.after, hunk.before)
    shows = (sys.executable, "-c", WORKS[heading])
    assert ran(*shows, cwd=tmp_path, PYTHONPATH=str(tmp_path)).returncode != 0
    for hunk in shown:
        replace(tmp_path, hunk.path, hunk.before, hunk.after)
    done = ran(*shows, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    for hunk in shown:
        assert (tmp_path / hunk.path).read_text() == (ROOT / hunk.path).read_text()

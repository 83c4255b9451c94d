"""Every command in the documentation is run here, or shown to be one that its program takes."""

import os
import re
import shlex
import sys
import tomllib
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from megatron.fold3d.config.read_config import read_config
from megatron.fold3d.plan.schedule_word import VALUES
from megatron.fold3d.predict.cost_model.model_shape import Family
from megatron.fold3d.predict.cost_model.presets import SCRIPTS, preset_flags
from tests.commands.traces import write_traces
from tests.programs import ROOT, printed, ran

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
LOG = ROOT / "scripts/bench/LOG.md"  # what was measured with older code, by its commands
FENCED = re.compile(r"^```(?:sh|console)\n(.*?)^```$", re.M | re.S)
INDENTED = re.compile(r"^\n((?:    \S.*\n(?:        .*\n)*)+)$", re.M)
FOLD3D = str(Path(sys.executable).with_name("fold3d"))
OWN_SCRIPT = ROOT / "tests/end_to_end/own_script.py"  # which the pages call by this name
# What `...` in a command stands for: a model, as far as Megatron's parser and we insist on one.
ELIDED = "--num-layers 80 --micro-batch-size 1"


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a page, with what the page says it prints."""

    page: str
    words: tuple[str, ...]
    output: str = ""
    section: str = field(default="", repr=False)
    """The text below the same heading, if that says what an indented command prints."""

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"


def commands(page: Path) -> Iterator[Command]:
    """Yield the commands of a page, in order."""
    text = page.read_text()
    for block in FENCED.findall(text):
        is_session = block.startswith("$ ")
        for part in re.split(r"^\$ ", block, flags=re.M)[1:] if is_session else [block]:
            lines = part.replace("\\\n", " ").splitlines()
            asked, printed = (lines[:1], lines[1:]) if is_session else (lines, [])
            for line in asked:
                yield Command(page.name, _words(line), "\n".join(printed).strip())
    for section in re.split(r"^##", text, flags=re.M):
        for block in INDENTED.findall(section):
            for line in block.replace("\\\n", " ").splitlines():
                programs = r"    (sudo|\S*python|torchrun|fold3d|sbatch|scripts/gpu.sh)( |$)"
                if re.match(programs, line):
                    yield Command(page.name, _words(line), section=section)


def _words(line: str) -> tuple[str, ...]:
    return tuple(shlex.split(line, comments=True))


COMMANDS = [command for page in PAGES for command in commands(page)]


@pytest.mark.processes
@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_is_one_that_its_program_takes(
    command: Command, parser: ArgumentParser, tmp_path_factory: pytest.TempPathFactory
):
    words = [word for word in command.words if word != "sudo"]
    program = Path(words[0]).name
    if any(re.fullmatch(form, " ".join(words)) for form in FORMS):
        return
    if program == "fold3d":
        _check_fold3d(command, words, tmp_path_factory)
    elif program in OTHERS:
        OTHERS[program](words)
    elif program == "torchrun" and "fold3d" in words:
        command_at = words.index("fold3d") + 1
        _takes([FOLD3D, words[command_at]], words[command_at + 1 :])
    elif program == "torchrun" or Path(words[1]).name in SCRIPTS.values():
        _check_training(parser, words[: words.index(">")] if ">" in words else words)
    elif program.startswith("python"):
        _check_script(words[3:] if words[1:3] == ["-W", "ignore"] else words[1:])
    elif program == "sbatch":
        _check_sbatch(parser, words[1:])
    else:
        pytest.fail(f"{command}: say here how {program} is checked")


def _check_fold3d(
    command: Command, words: Sequence[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if words[1] in ("search", "doctor"):  # half a minute; tests of the commands run smaller ones
        _takes([FOLD3D, words[1]], words[2:])
        return
    # A page's commands read what others wrote.
    folder = tmp_path_factory.getbasetemp() / command.page
    folder.mkdir(exist_ok=True)
    if not (folder / "scripts").exists():  # commands run from a checkout
        (folder / "scripts").symlink_to(ROOT / "scripts")
    if words[1] in ("trace", "compare"):
        for run in (word for word in words[2:] if "-" not in word and not Path(word).suffix):
            write_traces(folder / run)  # as training would have
    for written in (word for word in words if word.endswith(".svg")):
        (folder / written).parent.mkdir(parents=True, exist_ok=True)
    line = shlex.join([FOLD3D, *words[1:]]).replace("'>'", ">")
    done = ran("bash", "-c", line, cwd=folder, COLUMNS="100")
    assert (done.returncode, done.stderr) == (0, "")
    for drawn in (word for word in words if word.startswith("docs/images/")):
        assert (folder / drawn).read_bytes() == (ROOT / drawn).read_bytes(), "draw it anew"
    if command.output:
        assert _unpadded(done.stdout) == _unpadded(command.output)
    for seconds in re.findall(r"^iteration +(\S+) s$", done.stdout, re.M):
        assert not command.section or _says(command.section, float(seconds)), seconds


def _says(text: str, seconds: float) -> bool:
    """Tell whether a text has a time, in seconds or milliseconds, with three digits or more."""
    numbers = re.findall(r"(?<![\d.,@-])\d[\d.]*\d(?![\d,@-])", text)
    for number in (n for n in numbers if len(n.replace(".", "").lstrip("0")) > 2):
        decimals = len(number.partition(".")[2])
        if float(number) in (round(seconds, decimals), round(1000 * seconds, decimals)):
            return True
    return False


def test_a_time_is_said_if_it_is_there_as_printed():
    assert _says("takes 1.17 s", 1.1674)
    assert _says("| 0.5 | 1167 |", 1.1674)
    assert not _says("0.783 s, of 1.1 s, 11.67 s", 1.1674)


def _unpadded(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _check_training(parser: ArgumentParser, words: Sequence[str]) -> None:
    script = next(word for word in words if word.endswith(".py"))
    families: dict[str, Family] = {name: family for family, name in SCRIPTS.items()}
    flags = list(words[words.index(script) + 1 :])
    if "..." in flags:
        flags = [*ELIDED.split(), *(word for word in flags if word != "...")]
    args, own = parser.parse_known_args(flags)
    assert script in families or script == OWN_SCRIPT.name
    assert all(f'"{flag}"' in OWN_SCRIPT.read_text() for flag in own[::2])  # each with a value
    assert not own or script == OWN_SCRIPT.name
    preset = preset_flags(args.model_preset, families[script]) if args.model_preset else ()
    read_config(parser.parse_known_args([*preset, *flags])[0])


def _check_script(words: Sequence[str]) -> None:
    num_words = 2 if words[0] == "-m" else 1
    _takes([sys.executable, *words[:num_words]], words[num_words:])


def _takes(program: Sequence[str], words: Sequence[str]) -> None:
    """Assert that the program's help names every option among the words."""
    known = _options(tuple(program))
    options = [word for word in words if word.startswith("--") and " " not in word]
    assert [option for option in options if option not in known] == []


@cache
def _options(program: tuple[str, ...]) -> frozenset[str]:
    """Return the options that the program's help names; some import Megatron before they say it."""
    return frozenset(re.findall(r"--[\w-]+", printed(*program, "--help", PYTHONPATH=str(ROOT))))


def _check_sbatch(parser: ArgumentParser, words: Sequence[str]) -> None:
    script = next(i for i, word in enumerate(words) if word.endswith(".sbatch"))
    assert (ROOT / words[script]).is_file()
    given = [word for word in words[script + 1 :] if not re.match(r"(gpt3-\d+b|bert|cpm)$", word)]
    parser.parse_args(given)  # tests/scripts/test_slurm.py has the rest


def _check_make(words: Sequence[str]) -> None:
    printed("make", "--dry-run", *words[1:])


def _check_pip(words: Sequence[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = re.fullmatch(r"\.(?:\[([\w-]+)\])?", words[2])
    assert words[1] == "install"
    assert found is not None
    assert found[1] is None or found[1] in project["optional-dependencies"]


def _check_apt(words: Sequence[str]) -> None:
    assert [name for name in words[2:] if name not in (ROOT / ".ci/run").read_text()] == []


def _check_local_cluster(words: Sequence[str]) -> None:
    assert os.access(ROOT / words[0], os.X_OK)  # tests/scripts/test_slurm.py starts and stops one
    assert words[1] in ("start", "stop")


def _check_gpu_script(words: Sequence[str]) -> None:
    listed = (ROOT / words[0], "--dry-run", *words[1:])
    assert printed(*listed, GPUS="8", IMPLEMENTATIONS="local").startswith("== ")


OTHERS: dict[str, Callable[[Sequence[str]], None]] = {
    "apt-get": _check_apt,
    "gpu.sh": _check_gpu_script,
    "local_cluster.sh": _check_local_cluster,
    "make": _check_make,
    "pip": _check_pip,
}
# Where `.gitignore` expects it, that `make venv` makes, and any variable.
FORMS = (r"mkdir -p out", r"source \.venv/bin/activate", r"export \w+=\S+")


def test_commands_are_found_in_every_form_that_pages_have():
    programs = {Path(command.words[0]).name for command in COMMANDS}
    assert programs >= {"fold3d", "make", "torchrun", "sbatch", "python", "sudo"}
    assert any(command.output for command in COMMANDS)


@pytest.mark.parametrize("page", [*PAGES, LOG], ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Path):
    for target in re.findall(r"\]\((?!http)([^)\s]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        assert not heading or heading in _anchors(there), target


def _anchors(page: Path) -> list[str]:
    """Return what GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_paper_map_names_what_exists():
    text = (ROOT / "docs/paper.md").read_text()
    named = re.findall(r"`([\w/]+/\w+\.(?:py|cpp|cu|sbatch))(?:: ([\w.]+))?", text)
    assert len(named) > 30
    for path, name in named:
        (file,) = (f for f in (ROOT / path, ROOT / "megatron/fold3d" / path) if f.exists())
        for part in filter(None, name.split(".")):
            found = re.search(rf"^ *(?:def|class) {part}\b|^{part} = ", file.read_text(), re.M)
            assert found, f"{path} has no {part}"


def test_the_drawing_of_the_house_has_every_folder_and_no_other():
    text = (ROOT / "docs/architecture.md").read_text()
    (drawing,) = re.findall(r"^## The house\n.*?^```\n(.*?)^```$", text, re.M | re.S)
    drawn, above = set(), [""]
    for indent, name in re.findall(r"^( *)(\w+)/(?= |$)", drawing, re.M):
        above[len(indent) // 2 + 1 :] = [f"{above[len(indent) // 2]}{name}/"]
        drawn.add(above[-1])
    tops = ("megatron", "fold3d_patches", "csrc", "scripts", "docs")  # tests/ mirrors them
    there = {
        f"{folder.relative_to(ROOT)}/"
        for top in tops
        for file in (ROOT / top).rglob("*.*")
        for folder in (file.parent, *file.parent.parents)
        if "__pycache__" not in file.parts and folder.is_relative_to(ROOT / top)
    }
    assert drawn - {"tests/"} == there


def test_the_page_of_flags_has_a_row_for_every_flag_of_ours(parser: ArgumentParser):
    (group,) = (g for g in parser._action_groups if g.title == "FOLD3D")
    shown = (action for action in group._group_actions if action.help != SUPPRESS)
    ours = sorted(flag for action in shown for flag in action.option_strings)
    (section,) = re.findall(
        r"^## Every flag\n(.*?)^## ", (ROOT / "docs/flags.md").read_text(), re.M | re.S
    )
    rows = re.findall(r"^(?:\| (?=`--)|### )(.*?)(?: \||$)", section, re.M)
    assert sorted(flag for row in rows for flag in re.findall(r"`(--[\w-]+)", row)) == ours
    assert len(ours) == 16
    for key in VALUES:
        assert f"`{key}=" in section

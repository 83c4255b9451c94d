"""What tests share: a header naming the hardware, rules that skip tests, the commands."""

import json
import os
import re
import shlex
import sys
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import pytest
import torch

from megatron.fold3d.cli import main
from megatron.fold3d.config.all_flags import add_arguments

# On a machine that others use as well, how long an example takes says nothing.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


# What `make quick` leaves out (pyproject.toml). Python tells an audit hook that a process is about
# to start; `run_distributed` tells it that ranks are.
STARTS_PROCESSES = ("gloo", "processes")
STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.system", "tests.run_distributed")
_must_start_none = False


def _refuse_processes(event: str, args: tuple[object, ...]) -> None:
    # Megatron's package_info asks git for its own version when it is imported.
    asks_git = event == "subprocess.Popen" and args[0] == "git"
    if _must_start_none and event in STARTS and not asks_git:
        pytest.fail(f"{event}: mark this test with one of {', '.join(STARTS_PROCESSES)}")


sys.addaudithook(_refuse_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Fail a test that starts a process and is not marked as one: `make quick` would run it."""
    global _must_start_none
    _must_start_none = not any(map(item.get_closest_marker, STARTS_PROCESSES))
    try:
        return (yield)
    finally:
        _must_start_none = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put files that start processes first: at the end two workers share many short ones."""
    starting = {item.path for item in items if any(map(item.get_closest_marker, STARTS_PROCESSES))}
    items.sort(key=lambda item: item.path not in starting)


def pytest_report_header() -> str:
    if torch.cuda.is_available():
        gpus = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    else:
        gpus = "no CUDA GPU, tests marked gpu are skipped"
    return f"hardware: {len(os.sched_getaffinity(0))} CPU cores, {gpus}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--stress", action="store_true", help="run tests that are marked stress too")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("stress") and not item.config.getoption("--stress"):
        pytest.skip("takes long: make stress runs it")
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, and torch sees none")


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Put among pytest's folders what a process that is killed leaves behind.

    Megatron imports wandb, which makes two temporary folders when it is imported.
    """
    folder = tmp_path_factory.mktemp("tmp")
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    return folder


class MegatronParser(ArgumentParser):
    """Megatron's parser with our flags, which knows what only a newer Megatron has."""

    def __init__(self) -> None:
        from megatron.training.arguments import add_megatron_arguments

        super().__init__(allow_abbrev=False)
        add_megatron_arguments(self)
        reviewed = Path(__file__).with_name("reviewed_options.txt").read_text().split()
        names = {*reviewed} - {action.dest for action in self._actions}
        self.newer = {f"--{name.replace('_', '-')}" for name in names}
        add_arguments(self)

    def skip_newer(self, words: str) -> None:
        """Skip the test if words have a flag that this Megatron lacks."""
        if lacking := self.newer.intersection(re.findall(r"--[a-z0-9-]+", words)):
            pytest.skip(f"this Megatron-core has no {min(lacking)}")

    def error(self, message: str) -> NoReturn:
        self.skip_newer(message)
        super().error(message)


@pytest.fixture(scope="session")
def parser() -> MegatronParser:
    """Seconds to make, so once for all tests."""
    return MegatronParser()


@pytest.fixture(autouse=True)
def newer_options(request: pytest.FixtureRequest) -> None:
    """Skip what asks for an option of a newer Megatron-core, by a parameter or a mark."""
    whole = request.node.get_closest_marker("newest_options")
    if whole or "parser" in request.fixturenames:
        known: MegatronParser = request.getfixturevalue("parser")
        given = getattr(request.node, "callspec", None)
        known.skip_newer(" ".join(known.newer) if whole else repr(given and given.params))


class CommandLine:
    """Runs lines of `fold3d` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, line: str) -> tuple[int, str, str]:
        """Run a line; returns its exit code, stdout and stderr."""
        try:
            code = main(shlex.split(line))
        except SystemExit as exit_:  # argparse
            code = int(exit_.code or 0)
        return code, *self._capsys.readouterr()

    def out(self, line: str) -> str:
        """Return what a line prints that ends well, and says nothing on stderr."""
        code, out, err = self(line)
        assert (code, err) == (0, "")
        return out

    def json(self, line: str) -> Any:
        """Return what such a line prints with ``--json``, which goes before a training's flags."""
        command, dashes, flags = line.partition(" -- ")
        return json.loads(self.out(f"{command} --json{dashes}{flags}"))

    def refusal(self, line: str) -> str:
        """Return the message of a line that is refused: one line, or a plan's grid behind it."""
        code, out, err = self(line)
        assert (code, out) == (2, ""), err
        assert all(row.startswith("  rank ") for row in err.splitlines()[1:]), err
        return err


@pytest.fixture
def fold3d(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)

"""What files of this folder share: a command line's configuration, and why it is refused."""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

import pytest

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.config.read_config import read_config

MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --pipeline-model-parallel-size 2"
)
Parse = Callable[[str], Namespace]
Configure = Callable[[str], Fold3DConfig]


@pytest.fixture
def parse(parser: ArgumentParser, request: pytest.FixtureRequest) -> Parse:
    """Parse flags behind those of a model, and behind the ``MORE`` of the test's file."""
    more = getattr(request.module, "MORE", "")
    return lambda line: parser.parse_args(f"{MODEL} {more} {line}".split())


@pytest.fixture
def config(parse: Parse) -> Configure:
    """Read the configuration of flags behind those of a model."""
    return lambda line: read_config(parse(line))


@pytest.fixture
def problems(config: Configure) -> Callable[[str], list[str]]:
    """Return all lines by which a command line is refused."""

    def problems(line: str) -> list[str]:
        with pytest.raises(ValueError) as raised:  # noqa: PT011  # the caller looks at every line
            config(line)
        return str(raised.value).splitlines()

    return problems


@pytest.fixture
def problem(problems: Callable[[str], list[str]]) -> Callable[[str], str]:
    """Return the only line by which a command line is refused."""

    def problem(line: str) -> str:
        (problem,) = problems(line)
        return problem

    return problem


@pytest.fixture
def refused(problems: Callable[[str], list[str]]) -> Callable[..., None]:
    """Check that a line says what was found, and what to do; the only line if it is ``alone``."""

    def check(line: str, found: str, *, alone: bool = True) -> None:
        lines = problems(line)
        (problem,) = [one for one in lines if re.search(found, one)]
        assert "; " in problem
        assert len(lines) == 1 or not alone

    return check

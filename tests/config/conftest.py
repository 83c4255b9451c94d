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
def refused(config: Configure) -> Callable[..., None]:
    """Check that a line says what was found, and what to do; the only line if it is ``alone``."""

    def check(line: str, found: str, *, alone: bool = True) -> None:
        with pytest.raises(ValueError, match=found) as raised:
            config(line)
        problems = str(raised.value).splitlines()
        (problem,) = problems if alone else (p for p in problems if re.search(found, p))
        assert "; " in problem

    return check

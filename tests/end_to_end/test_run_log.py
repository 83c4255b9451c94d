"""Of a run's log of 900 lines and more, three are ours; the rest is Megatron's and torch's."""

import logging
from collections.abc import Sequence

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.test_equal_to_stock import Row
from tests.end_to_end.training import heard, train

pytestmark = pytest.mark.gloo


def test_what_we_add_to_the_log_of_a_run_is_three_lines() -> None:
    row = Row(word="aiao")
    first, *others = run_distributed(_listen, row.num_ranks, row.command(row.ours))
    assert [line.split()[0] for line in first] == ["patched", "patched", "plan"]
    assert others == [[]] * len(others)


def _listen(argv: Sequence[str]) -> list[str]:
    """Train; returns what we log in it."""
    patched, ours = (heard(name, logging.NOTSET) for name in ("fold3d_patches", "megatron.fold3d"))
    train(argv)
    return patched + ours

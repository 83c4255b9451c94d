"""`--check` and `fold3d simulate` predict the same of random jobs."""

import random
from argparse import ArgumentParser
from pathlib import Path

import pytest

from tests.stress.predictions import difference, draw


@pytest.mark.slow
def test_time_and_memory_do_not_depend_on_who_is_asked(parser: ArgumentParser, tmp_path: Path):
    dice = random.Random(8)
    jobs = [draw(dice) for _ in range(40)]
    differing = [(told, job) for job in jobs if (told := difference(job, parser, tmp_path))]
    assert differing == []

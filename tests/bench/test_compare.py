"""The command that compares: what it drops, and that a comparison runs from end to end."""

import re
import sys

import pytest

from megatron.fold3d.observe.training_log import LoggedIteration
from scripts.bench import compare
from scripts.bench.summary import Run
from scripts.bench.testbed import Link, Testbed, TestbedError
from scripts.bench.variants import DEFAULT, Variant
from tests.programs import printed

OURS = Variant("aiao-s2", ("--schedule", "aiao"))
SWEEP = [Variant(f"stock-v{v}", (str(v),)) for v in (2, 4, 8)]


def runs(variant, ms):
    iterations = (LoggedIteration(number=1, elapsed_ms=ms),)
    return [Run(variant=variant, round=number, iterations=iterations) for number in (0, 1)]


def test_after_the_first_round_the_fastest_of_the_sweep_go_on_with_default_and_ours():
    chosen = [DEFAULT, *SWEEP, OURS]
    times_ms = (900.0, 500.0, 300.0, 400.0, 800.0)
    first = [run for pair in zip(chosen, times_ms, strict=True) for run in runs(*pair)]
    assert compare.kept(chosen, first, 2) == [DEFAULT, SWEEP[1], SWEEP[2], OURS]
    assert compare.kept(chosen, first, 0) == [DEFAULT, OURS]


@pytest.mark.gloo
def test_a_comparison_runs_from_end_to_end(tmp_path):
    try:
        with Testbed(1, Link(1e8)):
            pass
    except TestbedError as error:
        pytest.skip(str(error))
    job = "--pp 2 --dp 1 --layers 2 --hidden 64 --microbatches 2 --forward-ms 20 --backward-ms 40"
    extent = "--rate 100mbit --rounds 1 --iterations 3 --warmup 1 --only stock-default"
    extent += " --timeout-s 120"
    command = [sys.executable, "-m", "scripts.bench.compare"]  # it imports Megatron, and forks
    out = printed(*command, *job.split(), *extent.split(), "--logs", tmp_path)
    (row,) = re.findall(r"\| \*\*stock-default\*\* \|.* \| (\d+) \| (\d+) \| ", out)
    compute_ms, link_ms = map(int, row)
    # Two micro-batches of one layer, and another for the bubble, at 60 ms each.
    assert compute_ms >= 180
    assert 0 < link_ms < compute_ms  # activations of 8 KB
    assert "Losses of 2 runs agree to 0.0e+00." in out

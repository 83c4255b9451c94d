"""`make demo`: how it tells the time that is left, and all of it in small."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.fold3d.observe.training_log import LoggedIteration
from scripts import demo
from scripts.bench.summary import Run
from scripts.bench.variants import DEFAULT

ROOT = Path(__file__).parents[2]
SMALL = """
import sys
from dataclasses import replace
from scripts import demo
job = replace(demo.JOB, num_layers=4, hidden_size=64)
demo.FORWARD_MS, demo.BACKWARD_MS = 4, 8
sys.exit(demo.main(sys.argv[1:], job))
"""


def test_a_run_that_is_over_leaves_a_line_with_the_time_that_is_left(capsys, monkeypatch):
    now_s = 0.0
    monkeypatch.setattr(demo.time, "monotonic", lambda: now_s)
    arms = demo.arms(demo.JOB)
    progress = demo.Progress(arms, 1, 5)
    for arm in arms:
        progress.begin(arm, 1)
        now_s += 2 * progress._guess_s(arm)  # this machine is half as fast as the guess
        iterations = tuple(LoggedIteration(number=n, elapsed_ms=1600.0) for n in range(1, 8))
        progress.end(Run(variant=DEFAULT, round=1, iterations=iterations, warmup=2))
    first, second, last = capsys.readouterr().out.splitlines()
    rest_s = sum(2 * progress._guess_s(arm) for arm in arms[1:])
    assert first.startswith("round 1 of 1  A stock's default    1600 (1600-1600) ms")
    assert first.endswith(f"about {rest_s:.0f} s left")
    assert second.endswith(f"about {2 * progress._guess_s(arms[2]):.0f} s left")
    assert "left" not in last


def test_the_strongest_stock_has_as_many_segments_as_ours():
    _, strongest, auto = demo.arms(demo.JOB)
    assert demo.JOB.segment_counts[-1] == 8
    assert auto.flags[2:4] == ("--segments", "8")
    assert strongest.flags[:2] == ("--num-virtual-stages-per-pipeline-rank", "8")


def in_small(tmp_path: Path, *before: str) -> str:
    command = [*before, sys.executable, "-c", SMALL, "--rounds", "1", "--timed", "3"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        # Where matplotlib has no cache of fonts yet.
        env={**os.environ, "TMPDIR": str(tmp_path.parent), "MPLCONFIGDIR": str(tmp_path / "fonts")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "matplotlib" not in done.stderr
    return done.stdout


@pytest.mark.gloo
@pytest.mark.timeout(300)
def test_the_demo_runs_from_end_to_end(tmp_path: Path):
    as_user = ["unshare", "--user", "--map-root-user"]
    if subprocess.run([*as_user, "unshare", "--net", "true"], capture_output=True).returncode:
        pytest.skip("users may not make namespaces here")
    out = in_small(tmp_path / "out", *as_user)
    assert "4 ranks on links of 180 Mb/s, 2 pipelines of 2" in out
    assert len(re.findall(r"^round 1 of 1  [ABC] .* ms", out, re.MULTILINE)) == 3
    [verdict] = re.findall(r"^(.*C auto.* (?:fast|slow)er.*) \(bootstrap\)", out, re.MULTILINE)
    assert "loss: equal in every digit in 5 of 5 iterations" in out
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]  # not even a temporary folder is left
    for name in ("timelines.svg", "demo.html"):
        assert f"<title>{verdict}</title>" in (tmp_path / "out" / name).read_text()


@pytest.mark.stress
@pytest.mark.gloo
@pytest.mark.timeout(300)
def test_where_namespaces_are_forbidden_the_demo_says_so_and_compares_losses(tmp_path: Path):
    out = in_small(tmp_path / "out", "setpriv", "--bounding-set", "-sys_admin", "--no-new-privs")
    assert out.startswith("Without slow links, so no times are compared: cannot make a network")
    assert "faster" not in out
    assert "loss: equal in every digit in 5 of 5 iterations" in out

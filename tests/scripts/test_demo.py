"""`make demo`: what it compares, and all of it in small."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import demo

ROOT = Path(__file__).parents[2]
SMALL = """
import sys
from dataclasses import replace
from scripts import demo
job = replace(demo.JOB, num_layers=4, hidden_size=64)
demo.FORWARD_MS, demo.BACKWARD_MS = 4, 8
sys.exit(demo.main(sys.argv[1:], job))
"""


def test_the_strongest_stock_has_as_many_segments_as_ours():
    _, strongest, auto = demo.arms(demo.JOB)
    assert demo.JOB.segment_counts[-1] == 8
    assert "--segments 8" in " ".join(auto.flags)
    assert "--num-virtual-stages-per-pipeline-rank 8" in " ".join(strongest.flags)


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
    assert "4 ranks on links of 90 Mb/s, 2 pipelines of 2" in out
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

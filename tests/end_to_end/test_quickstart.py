"""The quick start's first commands, run as they stand by a shell in an empty folder."""

import os
import re
import sys
from pathlib import Path

import pytest

from tests.programs import ROOT, printed

PAGE = ROOT / "docs/quickstart.md"
ABSENT = ROOT / "tests/absent"  # packages that a job may lack, and starts faster without


@pytest.mark.gloo
@pytest.mark.processes
def test_a_first_run_is_compared_with_stock(tmp_path: Path) -> None:
    (section,) = re.findall(r"^## A run and a comparison\n(.*?)^## ", PAGE.read_text(), re.M | re.S)
    (commands,) = re.findall(r"^```sh\n(.*?)^```$", section, re.M | re.S)
    for name in ("pretrain_gpt.py", "scripts"):  # of the checkout that the page speaks of
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    found = {"PATH": path, "PYTHONPATH": f"{ABSENT}{os.pathsep}{ROOT}"}
    out = printed("bash", "-e", "-c", commands, cwd=tmp_path, **found)
    assert "loss: equal in every digit in 10 of 10 iterations" in out
    assert "No verdict: ranks shared the cores of one machine" in out
    assert (tmp_path / "out/aiao/timeline.html").exists()
    assert "validation loss" in (tmp_path / "out/aiao.log").read_text()

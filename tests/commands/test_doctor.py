import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.fold3d.commands.installation import installation
from megatron.fold3d.runtime.measure.link_speeds import pairs
from tests.distributed import run_distributed

FOLD3D = "import sys; from megatron.fold3d.cli import main; sys.exit(main())"


def doctor(*options: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a fresh interpreter, with a folder in front of all others."""
    folders = [*([str(path)] if path else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, "-c", FOLD3D, "doctor", *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(folders)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def found(what: str) -> Any:
    return next(finding for finding in installation() if finding.what == what)


@pytest.mark.processes
def test_this_installation_is_ready():
    done = doctor("--json")
    report = json.loads(done.stdout)
    bad = [finding for finding in report["findings"] if finding["verdict"] == "bad"]
    assert (done.returncode, report["ok"], bad) == (0, True, [])
    whats = [finding["what"] for finding in report["findings"]]
    assert {"Python", "torch", "megatron-core", "namespace", "GPUs", "patches"} <= set(whats)


@pytest.mark.processes
def test_a_torch_that_cannot_be_imported_is_a_finding(tmp_path: Path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: no such file')\n")
    done = doctor(path=tmp_path)
    assert done.returncode == 1
    assert "bad   torch" in done.stdout
    assert "libcudart.so.13: no such file" in done.stdout
    assert done.stdout.endswith("1 to fix\n")
    assert done.stderr == ""


def test_a_package_that_hides_the_namespace_is_named(tmp_path: Path, monkeypatch):
    init = tmp_path / "megatron" / "__init__.py"
    init.parent.mkdir()
    init.write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "megatron")
    finding = found("namespace")
    assert finding.verdict == "bad"
    assert finding.fix == f"delete {init}"


def test_a_second_megatron_core_is_named(tmp_path: Path, monkeypatch):
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "megatron")
    finding = found("namespace")
    assert finding.verdict == "bad"
    assert f"megatron.core in {tmp_path / 'megatron' / 'core'}"[:-5] in finding.found


def test_the_apex_of_pypi_is_told_from_nvidias(tmp_path: Path, monkeypatch):
    info = tmp_path / "apex-0.9.10.dist-info"
    for folder in (tmp_path / "apex", info):
        folder.mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: apex\nVersion: 0.9.10\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert found("apex").verdict == "bad"
    assert "pip uninstall apex" in found("apex").fix
    (tmp_path / "apex" / "optimizers").mkdir()
    assert found("apex").verdict == "ok"


def test_large_jobs_measure_a_ring_and_small_ones_every_pair():
    assert pairs(3) == [(0, 1), (0, 2), (1, 2)]
    assert pairs(10)[-1] == (9, 0)
    assert len(pairs(10)) == 10


@pytest.mark.gloo
def test_ranks_compare_notes_and_measure_their_links():
    [(others, links), _] = run_distributed(_meet, 2)
    ((source, target, latency_s, bytes_per_s),) = links
    assert (source, target) == (0, 1)
    assert 1e-6 < latency_s < 1.0
    assert bytes_per_s > 1e6
    assert [(f.verdict, f.found) for f in others] == [("note", "2.28"), ("bad", "too small")]
    assert [f.what for f in others] == ["rank 1: NCCL", "rank 1: shared memory"]


def _meet() -> Any:
    """Rank 1 has another NCCL than rank 0, and what is bad on it."""
    from megatron.fold3d.training.installation_facts import Finding, meet

    same = Finding("torch", "ok", "2.13.0")
    if os.environ["RANK"] == "0":
        return meet([same, Finding("NCCL", "ok", "2.27")])
    meet([same, Finding("NCCL", "ok", "2.28"), Finding("shared memory", "bad", "too small")])
    return None

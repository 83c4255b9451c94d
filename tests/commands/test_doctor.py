import json
import os
import re
import subprocess
import sys
import tomllib
from argparse import Namespace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from megatron.fold3d.commands import doctor as command
from megatron.fold3d.commands.doctor import cluster_toml
from megatron.fold3d.commands.installation import Finding, installation
from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.runtime.measure.lanes import pairs
from megatron.fold3d.training.installation_facts import (
    architectures,
    busy,
    connections,
    pair,
    untested,
)
from tests.distributed import run_distributed
from tests.programs import ROOT, ran

FOLD3D = "import sys; from megatron.fold3d.cli import main; sys.exit(main())"


def doctor(*options: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command in a fresh interpreter, with a folder in front of all others."""
    folders = [*([str(path)] if path else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = (sys.executable, "-c", FOLD3D, "doctor", *options)
    return ran(*command, PYTHONPATH=os.pathsep.join(folders))


def found(what: str) -> Any:
    return next(finding for finding in installation() if finding.what == what)


@pytest.mark.processes
def test_this_installation_is_ready():
    done = doctor("--json")
    report = json.loads(done.stdout)
    bad = [finding for finding in report["findings"] if finding["verdict"] == "bad"]
    assert (done.returncode, report["ok"], bad) == (0, True, [])
    whats = [finding["what"] for finding in report["findings"]]
    assert {"Python", "torch", "megatron-core", "namespace", "versions", "GPUs", "patches"} <= set(
        whats
    )


@pytest.mark.processes
def test_a_torch_that_cannot_be_imported_is_a_finding(tmp_path: Path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: no such file')\n")
    done = doctor(path=tmp_path)
    assert done.returncode == 1
    assert "bad   torch" in done.stdout
    assert "libcudart.so.13: no such file" in done.stdout
    assert done.stdout.endswith("1 to fix\n")
    assert done.stderr.count("\n") == 1  # what it does meanwhile
    assert done.stderr.startswith("... imports torch and Megatron")


def test_what_files_tell_is_told_before_torch_is_imported(capsys, monkeypatch):
    def probe(*, measures: bool) -> Any:
        said = capsys.readouterr()
        assert re.search("^ok +Python ", said.out, re.M)
        assert said.err.startswith("... imports torch and Megatron")
        return [Finding("patches", "ok", "apply")], [], {}

    monkeypatch.setattr(command, "_probe", probe)
    assert command.run(Namespace(json=False, write_cluster=None)) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok    patches             apply",
        "ready to train",
    ]


def test_without_torch_and_megatron_there_is_a_planner(fold3d, monkeypatch):
    def version(name: str) -> str:
        if name in ("torch", "megatron-core"):
            raise metadata.PackageNotFoundError(name)
        return "1"

    monkeypatch.setattr(metadata, "version", version)
    assert fold3d.out("doctor").endswith(
        "note  training            without torch and Megatron\n"
        "                          -> in the checkout of FOLD3D: pip install '.[train]'\n"
        "ready to plan, simulate and search\n"
    )


@pytest.mark.parametrize(
    ("file", "named", "fix"),
    [
        ("megatron/__init__.py", "", "delete {}/megatron/__init__.py"),
        ("megatron/core/second.py", "megatron.core in {}/megatron", ""),
    ],
)
def test_what_hides_the_installed_megatron_is_named(tmp_path, monkeypatch, file, named, fix):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "megatron")
    finding = found("namespace")
    assert finding.verdict == "bad"
    assert named.format(tmp_path) in finding.found
    assert fix.format(tmp_path) in finding.fix


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
    assert found("apex").verdict == "note"
    assert "training then runs with --no-gradient-accumulation-fusion" in found("apex").found
    (tmp_path / "fused_weight_gradient_mlp_cuda.py").touch()
    assert found("apex").verdict == "ok"


def test_large_jobs_measure_a_ring_and_small_ones_every_pair():
    assert pairs(3) == [(0, 1), (0, 2), (1, 2)]
    assert pairs(10)[-1] == (9, 0)
    assert len(pairs(10)) == 10


@pytest.mark.gloo
def test_ranks_compare_notes_and_measure_their_links_and_themselves(tmp_path: Path):
    [(others, links, machine), _] = run_distributed(_meet, 2)
    ((source, target, latency_s, bytes_per_s),) = links
    assert (source, target) == (0, 1)
    assert 1e-6 < latency_s < 1.0
    assert bytes_per_s > 1e6
    assert [(f.verdict, f.found) for f in others] == [("note", "2.28"), ("bad", "too small")]
    assert [f.what for f in others] == ["rank 1: NCCL", "rank 1: shared memory"]
    assert (machine["num_nodes"], machine["gpus_per_node"]) == (1, 2)
    layers = machine["layers"]
    assert all(0 < value < 1e15 for name, value in machine.items() if name != "layers")
    assert len(layers) == 4
    assert all(0 < rate < 1e15 for *_, rate in layers)
    keys = ("source", "target", "latency_s", "bytes_per_s")
    file = tmp_path / "here.toml"
    file.write_text(cluster_toml("here", machine, [dict(zip(keys, links[0], strict=True))]))
    found = cluster(str(file))
    assert (found.name, found.num_gpus) == ("here", 2)
    assert found.intra_bytes_per_s == found.nic_bytes_per_s == bytes_per_s
    assert [row[:4] for row in found.layer_efficiencies] == [tuple(row[:4]) for row in layers]
    assert max(row[4] for row in found.layer_efficiencies) == 1


def test_a_cluster_file_tells_links_inside_a_node_from_those_between():
    machine = {"num_nodes": 2, "gpus_per_node": 2, "memory_bytes": 4e10}
    machine |= {"device_bytes_per_s": 1e12, "multiprocessors": 108}
    machine["layers"] = [(1, 2048, 4096, 1, 1.5e14), (4, 2048, 4096, 1, 2e14)]
    machine |= {"host_copy_bytes_per_s": 1e9, "host_memory_bytes": 1e11}
    rates = {(0, 1): 9e9, (2, 3): 9e9, (0, 2): 1e9, (0, 3): 1e9, (1, 2): 1e9, (1, 3): 5e8}
    links = [
        {"source": a, "target": b, "latency_s": 2e-5, "bytes_per_s": rate}
        for (a, b), rate in rates.items()
    ]
    found = tomllib.loads(cluster_toml("two", machine, links))
    assert (found["intra_bytes_per_s"], found["nic_bytes_per_s"]) == (9e9, 1e9)
    assert found["host_copy_bytes_per_s"] == 2e9
    assert (found["gpu_flops_per_s"], found["compute_efficiency"]) == (2e14, 1)
    assert found["layer_efficiencies"] == [[1, 2048, 4096, 1, 0.75], [4, 2048, 4096, 1, 1]]


@pytest.mark.parametrize(
    ("of_others", "drift", "found"),
    [
        (1e9, 0.05, None),
        (9e9, 0.05, "other processes hold 8.4 GiB of a GPU that is to be measured"),
        (1e9, 0.3, "a layer's time changed by 30% between two measurements on a GPU"),
    ],
)
def test_a_gpu_that_another_job_uses_is_not_measured(of_others: float, drift: float, found: Any):
    finding = busy(of_others, drift)
    assert (finding is None) == (found is None)
    if finding is not None:
        assert finding.found == f"{found}; measured times are to be of this job alone"
        assert (finding.verdict, "nvidia-smi" in finding.fix) == ("bad", True)


@pytest.mark.parametrize(
    ("ranks", "file", "message"),
    [
        ("1", "c.toml", "--write-cluster c.toml on one rank: links between ranks are measured"),
        ("2", "c.txt", "--write-cluster c.txt: give a .toml file in a folder that exists"),
        ("2", "/nowhere/c.toml", "--write-cluster /nowhere/c.toml: give a .toml file"),
    ],
)
def test_a_cluster_that_cannot_be_written_is_refused(fold3d, monkeypatch, ranks, file, message):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    assert message in fold3d.refusal(f"doctor --write-cluster {file}")


def _meet() -> Any:
    """Rank 1 has another NCCL than rank 0, and what is bad on it."""
    from megatron.fold3d.training.installation_facts import Finding, meet

    same = Finding("torch", "ok", "2.13.0")
    if os.environ["RANK"] == "0":
        return meet([same, Finding("NCCL", "ok", "2.27")], measures=True)
    worse = [Finding("NCCL", "ok", "2.28"), Finding("shared memory", "bad", "too small")]
    meet([same, *worse], measures=True)
    return None


@pytest.mark.parametrize(
    ("capability", "built_for", "verdict"),
    [
        ((8, 0), ["sm_75", "sm_80", "sm_90"], "ok"),
        ((8, 6), ["sm_80"], "ok"),
        ((7, 0), ["sm_75", "sm_80"], "bad"),
        ((7, 0), ["sm_70", "compute_90"], "ok"),
        ((12, 0), ["sm_90", "sm_120"], "ok"),
    ],
)
def test_a_gpu_that_torch_has_no_kernels_for_is_named(capability, built_for, verdict):
    finding = architectures({"a GPU": capability}, built_for, "CUDA 13.0")
    assert finding.verdict == verdict
    assert verdict == "ok" or "a GPU is sm_70; torch (CUDA 13.0) has sm_75" in finding.found


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [("2.8.0", False), ("2.9.1", True), ("2.13.0a0+nv26.1", True), ("2.16.0", False)],
)
def test_a_torch_that_no_test_runs_with_is_named(monkeypatch, version: str, is_tested: bool):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [
        f"{line}; extra == '{extra}'"
        for extra, lines in project["optional-dependencies"].items()
        for line in lines
    ]
    installed = {"torch": version, "transformer-engine": "2.20.1"}
    monkeypatch.setattr(metadata, "version", installed.__getitem__)
    found = [(f.what, f.verdict, f.found.split("; ")[0]) for f in untested(requirements)]
    assert found == ([] if is_tested else [("torch", "note", version)])


def test_a_pair_of_versions_is_told_with_how_its_tests_ended_or_how_to_try_it(monkeypatch):
    row = {"megatron-core": "0.18.2", "torch": "2.10.0", "date": "2026-11-29", "result": "9 passed"}
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: json.dumps([row]))
    monkeypatch.setattr("megatron.core.package_info.__version__", "0.18.2+a1b2c3d")
    monkeypatch.setattr("torch.__version__", "2.10.0a0+nv25.12")
    assert pair().found == ("Megatron-core 0.18.2 with torch 2.10.0, tried on 2026-11-29: 9 passed")
    monkeypatch.setattr("torch.__version__", "2.11.0+cu128")
    assert pair().verdict == "note"
    assert "scripts.try_versions 2.11.0:0.18.2" in pair().fix


@pytest.mark.parametrize(
    ("setting", "verdict"),
    [
        ({}, "ok"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, "ok"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "note"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "bad"),
    ],
)
def test_settings_of_launches_are_judged(setting, verdict):
    assert connections(setting).verdict == verdict

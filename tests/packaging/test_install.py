"""Our portion installs beside megatron-core's, as a wheel and from a checkout."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.commands.traces import write_traces

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
SITE = Path(sysconfig.get_path("purelib"))
PORTIONS = ("megatron", "fold3d_patches")
PACKED = (".py", ".pyi", ".html", ".css", ".js", ".json")
ENGINE = ROOT / "tests/runtime/weight_grads/engine.py"  # says which versions it follows
TRIED = ROOT / "megatron/fold3d/upstream/tried.json"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package's sources, because building writes beside them."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder)
    for name in PORTIONS:
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    return folder


@pytest.fixture(scope="module", params=["wheel", "editable"])
def wheel(request: pytest.FixtureRequest, checkout: Path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp(request.param)
    build = f"from setuptools import build_meta; build_meta.build_{request.param}({str(out)!r})"
    run(sys.executable, "-c", build, cwd=checkout)
    [built] = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment with our wheel in it; torch and megatron-core are this one's."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps"]
    run(*pip, "--no-index", wheel, cwd=folder)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "requirements.pth").write_text(str(SITE))
    return python


def test_installed_package_shares_the_megatron_namespace_and_has_its_command(python, checkout):
    find = (
        "from importlib.util import find_spec as find;"
        "print(*(find(f'megatron.{name}').origin for name in ('core', 'training', 'fold3d')));"
        "assert find('megatron').origin is None"
    )
    for folder in (python.parent, checkout):
        core, training, ours = (Path(file) for file in run(python, "-c", find, cwd=folder).split())
        assert core.parents[1] == training.parents[1] == SITE / "megatron"
        assert not ours.is_relative_to(ROOT)
    load = "from fold3d_patches.cpu.compiler import uncompiled\nwith uncompiled(): "
    run(python, "-Wignore", "-c", f"{load}import megatron.training", cwd=python.parent)
    assert "verify" in run(python.with_name("fold3d"), "--help", cwd=python.parent)


@pytest.mark.parametrize("wheel", ["wheel"], indirect=True)
def test_wheel_holds_our_files_and_nothing_of_megatron(wheel: Path, checkout: Path):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        [entry_points] = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
        assert "fold3d = megatron.fold3d.cli:main" in archive.read(entry_points).decode()
    ours = {
        str(path.relative_to(checkout))
        for name in PORTIONS
        for path in (checkout / name).rglob("*")
        if path.suffix in (".py", ".pyi", ".html", ".css", ".js", ".json")
        or path.name == "py.typed"
    }
    assert packed == ours
    assert "megatron/__init__.py" not in packed
    assert "megatron/fold3d/py.typed" in packed


def interpreter(version: str) -> str:
    """Return a Python of this version, which pyenv may hide from the PATH."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" == version:
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for found in (*pyenv.glob(f"{version}.*/bin/python"), shutil.which(f"python{version}")):
        if (
            found
            and not subprocess.run([found, "-c", "import venv"], capture_output=True).returncode
        ):
            return str(found)
    pytest.skip(f"no Python {version} here")


@pytest.mark.parametrize("wheel", ["wheel"], indirect=True)
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_wheel_alone_plans_simulates_and_compares(wheel: Path, version: str, tmp_path: Path):
    run(interpreter(version), "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q"]
    run(*pip, "--no-index", wheel, cwd=tmp_path)  # with its requirements: there is none
    write_traces(tmp_path / "run")
    plan = "plan --schedule aiao --pp 2 --segments 2 --microbatches 3"
    command = python.with_name("fold3d")
    (tmp_path / "plan.txt").write_text(run(command, *plan.split(), cwd=tmp_path))
    for line in (
        "verify --plan-file plan.txt",
        "simulate --schedule plan=plan.txt --html plan.html",
        "search --model 24-2048-16 --cluster h100x8 --global-batch-size 8 --pp 2 --tp 4",
        "trace run",
        "compare run run",
        "doctor",
    ):
        run(command, *line.split(), cwd=tmp_path)


def test_what_is_tested_is_what_is_allowed():
    extras = PROJECT["optional-dependencies"]
    allowed = {(r := Requirement(line)).name: r.specifier for line in extras["train"]}
    pinned = {(r := Requirement(line)).name: r.specifier for line in extras["dev"]}
    assert PROJECT["dependencies"] == []
    for name in ("torch", "megatron-core"):
        [pin] = pinned[name]
        tried = sorted(Version(row[name]) for row in json.loads(TRIED.read_text()))
        assert all(version in allowed[name] for version in (pin.version, *tried))
        oldest, newest = tried[0], tried[-1]
        assert f"{newest.major}.{newest.minor + 1}.0" not in allowed[name]
        assert f"{oldest.major}.{oldest.minor - 1}.99" not in allowed[name]
    for extra in ("gpu", "gpu-cu12"):
        train, engine = extras[extra]
        assert train == "fold3d[train]"
        assert "_" not in engine  # older versions of pip find no extra that is not normalized
        [least, below] = sorted(Requirement(engine).specifier, key=str, reverse=True)
        read = re.search(r"Transformer Engine ([\d.]+) to 2\.(\d+) ", ENGINE.read_text())
        assert (str(least), str(below)) == (f">={read[1]}", f"<2.{int(read[2]) + 1}")


def test_nothing_advises_to_install_from_an_index_that_does_not_have_us():
    listed = run("git", "ls-files", cwd=ROOT).splitlines()
    advice = re.compile(r"pip install [^`\n]*\bfold3d\b")
    texts = [ROOT / name for name in listed if Path(name).suffix in (".py", ".md", ".sh", ".toml")]
    assert len(texts) > 300
    assert [str(file) for file in texts if advice.search(file.read_text())] == []

"""Our portion installs beside megatron-core's, as a wheel and from a checkout."""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
SITE = Path(sysconfig.get_path("purelib"))
PORTIONS = ("megatron", "fold3d_patches")


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


def test_installed_package_shares_the_megatron_namespace(python: Path, checkout: Path):
    find = (
        "from importlib.util import find_spec as find;"
        "print(*(find(f'megatron.{name}').origin for name in ('core', 'training', 'fold3d')));"
        "assert find('megatron').origin is None"
    )
    for folder in (python.parent, checkout):
        core, training, ours = (Path(file) for file in run(python, "-c", find, cwd=folder).split())
        assert core.parents[1] == training.parents[1] == SITE / "megatron"
        assert not ours.is_relative_to(ROOT)
    run(python, "-Wignore", "-c", "import megatron.training, fold3d_patches", cwd=python.parent)


def test_console_script_runs(python: Path):
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
        if path.suffix in (".py", ".pyi", ".html", ".css", ".js") or path.name == "py.typed"
    }
    assert packed == ours
    assert "megatron/__init__.py" not in packed
    assert "megatron/fold3d/py.typed" in packed

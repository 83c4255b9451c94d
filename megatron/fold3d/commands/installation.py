"""What can be found out about an installation without importing torch or Megatron."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from megatron.fold3d.config.gpu_settings import FUSION_KERNEL, default_flags, has_fusion_kernel

Verdict = Literal["ok", "note", "bad"]
_Told = tuple[Verdict, str] | tuple[Verdict, str, str]  # all of a finding but what was looked at

MEGATRON = "megatron-core"
_TRAINS = ("torch", MEGATRON)
_PARTS = ("core", "training", "fold3d")
_SHM = Path("/dev/shm")
_SHM_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        verdict: ``bad`` keeps training from working, a ``note`` may surprise.
        found: the facts, in words.
        fix: the way to mend it; empty if nothing is wrong.
    """

    what: str
    verdict: Verdict
    found: str
    fix: str = ""


def install(extra: str) -> str:
    """Return what installs an extra of ours; FOLD3D is on no package index."""
    return f"in the checkout of FOLD3D: pip install '.[{extra}]'"


def installation() -> Iterator[Finding]:
    """Yield what the files of the installation tell."""
    yield Finding("Python", *_python())
    place = Path(__file__).parents[3]
    yield _package("fold3d", "ok", f"imported from {place}, not installed", "")
    if not any(_version(name) for name in _TRAINS):
        yield Finding("training", "note", "without torch and Megatron", install("train"))
        return
    for name in _TRAINS:
        yield _package(name, "bad", "not installed", install("train"))
    absent = "not installed; fp8 and fused layers need it"
    yield _package("transformer-engine", "note", absent, f"on GPUs, {install('gpu')}")
    yield Finding("apex", *_apex())
    yield Finding("namespace", *_namespace())
    yield Finding("shared memory", *_shared_memory())
    if settings := sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("NCCL_")):
        yield Finding("NCCL settings", "note", ", ".join(settings))


def _python() -> _Told:
    version = sys.version.split()[0]
    if sys.version_info >= (3, 14):
        return "bad", version, "Megatron-core has wheels for 3.12 and 3.13"
    return "ok", f"{version} ({sys.executable})"


def _package(name: str, verdict: Verdict, absent: str, fix: str) -> Finding:
    version = _version(name)
    return Finding(name, "ok", version) if version else Finding(name, verdict, absent, fix)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _apex() -> _Told:
    version = _version("apex")
    if version is None:
        return "ok", f"not installed; on GPUs training then runs with {_unfused()}"
    spec = find_spec("apex")
    homes = spec.submodule_search_locations if spec else None
    if homes and not any((Path(home) / "optimizers").is_dir() for home in homes):
        return (
            "bad",
            f"{version} from PyPI, which is not NVIDIA's and which Megatron imports",
            "pip uninstall apex; NVIDIA's is built from https://github.com/NVIDIA/apex",
        )
    if not has_fusion_kernel():
        return (
            "note",
            f"{version}, without {FUSION_KERNEL}: training then runs with {_unfused()}",
            "build it from https://github.com/NVIDIA/apex with --cpp_ext and --cuda_ext",
        )
    return "ok", f"{version}, with {FUSION_KERNEL}"


def _unfused() -> str:
    return " ".join(default_flags()) or "an output layer that does not fuse its weight gradient"


def _namespace() -> _Told:
    """Every folder named megatron on the path is a part of it, unless one has an __init__.py."""
    spec = find_spec("megatron")
    if spec is not None and spec.origin is not None:
        found = f"{spec.origin} makes megatron a package of its own and hides the others"
        return "bad", found, f"delete {spec.origin}"
    homes = [Path(home) for home in (spec and spec.submodule_search_locations) or ()]
    homes = list(dict.fromkeys(home.resolve() for home in homes))
    parts = {name: [home for home in homes if (home / name).is_dir()] for name in _PARTS}
    for name, places in parts.items():
        if not places:
            return "bad", f"no megatron.{name}", install("train")
        if len(places) > 1:
            found = f"megatron.{name} in {' and '.join(map(str, places))}; Python takes the first"
            fix = "uninstall one, or take the folder above it off PYTHONPATH"
            return "bad" if name != "fold3d" else "note", found, fix
    return "ok", f"megatron is shared by {', '.join(map(str, homes))}"


def _shared_memory() -> _Told:
    if not _SHM.is_dir():
        return "note", f"no {_SHM}"
    usage = os.statvfs(_SHM)
    size = usage.f_frsize * usage.f_blocks
    found = f"{size / 2**30:.1f} GiB in {_SHM}"
    if size < _SHM_BYTES:
        return (
            "bad",
            f"{found}; data loaders and NCCL share their buffers there",
            "start the container with --shm-size=8g, or --ipc=host",
        )
    return "ok", found

"""Which patches fit another version of Megatron-core, without changing this environment.

    .venv/bin/python scripts/try_megatron.py            # the newest on PyPI, pre-releases too
    .venv/bin/python scripts/try_megatron.py 0.18.2
    .venv/bin/python scripts/try_megatron.py --folder ~/Megatron-LM

Puts the version into a folder that is deleted afterwards, in front of all that Python imports.
Applies each patch there by itself, as if it were written for that version, imports each module of
ours, and prints what is missing. Where nothing is, it runs `tests/patches` with the version. Exits
with 0 if all is well, 1 if not, 2 if there is no such version: a CI job can ask for the newest.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from runpy import run_path
from tempfile import TemporaryDirectory

from packaging.version import Version

from scripts.try_torch import installed, python

ROOT = Path(__file__).parents[1]
PACKAGES = ("megatron/fold3d/runtime", "megatron/fold3d/training", "fold3d_patches")
_INSIDE = "--inside"  # this file calls itself with the version on its path
_TESTS = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/patches")
_ACCEPT = """\
from fold3d_patches import registry
from packaging.specifiers import SpecifierSet
registry.MEGATRON = SpecifierSet("=={}", prereleases=True)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print what the patches lack with another version; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", nargs="?", help="such as 0.18.2 (default: the newest)")
    parser.add_argument("--folder", type=Path, help="a checkout, instead of a version of PyPI")
    parser.add_argument("--patches-only", action="store_true", help="run no tests")
    args = parser.parse_args(argv)
    with TemporaryDirectory(prefix="fold3d-megatron-") as temporary:
        folder = args.folder or Path(temporary)
        wanted = f"megatron-core=={args.version}" if args.version else "megatron-core"
        if args.folder is None and not installed(folder, "--no-deps", "--pre", wanted):
            return 2
        if (version := _version(folder)) is None:
            print(f"no megatron/core/package_info.py in {folder}", file=sys.stderr)
            return 2
        print(f"megatron-core {version}", flush=True)
        # Every Python process reads it first, ranks of tests too.
        Path(temporary, "sitecustomize.py").write_text(_ACCEPT.format(version), encoding="utf-8")
        for command in ((__file__, _INSIDE), _TESTS)[: 1 if args.patches_only else 2]:
            if code := python(ROOT, (Path(temporary), folder), command).returncode:
                return code
        return 0


def _version(folder: Path) -> str | None:
    info = folder / "megatron/core/package_info.py"
    return Version(run_path(str(info))["__version__"]).public if info.is_file() else None


def inside() -> int:
    """Look at the version that this interpreter imports."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    lacking = [*_of_modules(), *_of_patches()]
    print("\n".join(lacking) or "all patches fit")
    return int(bool(lacking))


def _of_modules() -> Iterator[str]:
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            yield from _of_import(name)


def _of_import(name: str) -> Iterator[str]:
    """Import a module; a name that it looks for in vain gets a stand-in, and is told."""
    try:
        import_module(name)
    except ImportError as error:
        yield f"  {name}: {_first_line(error)}"
        if error.name in sys.modules and error.name_from is not None:
            setattr(sys.modules[error.name], error.name_from, None)
            yield from _of_import(name)
    except Exception as error:  # noqa: BLE001  (whatever it is, this version lacks it)
        yield f"  {name}: {type(error).__name__}: {_first_line(error)}"


def _of_patches() -> Iterator[str]:
    from fold3d_patches.registry import apply

    yield from _of_import("tests.patches.test_upstream")
    for patch in getattr(sys.modules.get("tests.patches.test_upstream"), "PATCHES", ()):
        try:
            apply([patch]).close()
        except Exception as error:  # noqa: BLE001
            yield f"  {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "").partition("; read what upstream changed")[0]


if __name__ == "__main__":
    if sys.argv[1:2] == [_INSIDE]:
        sys.exit(inside())
    sys.exit(main())

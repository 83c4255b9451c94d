"""Which patches fit, and which tests pass, with other versions of torch and Megatron-core.

    .venv/bin/python -m scripts.try_versions            # the oldest and the newest pair
    .venv/bin/python -m scripts.try_versions 2.10.0:0.18.2 2.15.0 --write
    .venv/bin/python -m scripts.try_versions :newest :$HOME/Megatron-LM --lacking

A pair is TORCH:MEGATRON; what is left out is the version that the tests run with. Megatron-core may
also be `newest`, with pre-releases, or the folder of a checkout. Each pair has a copy of the work
tree in build/versions, whose pyproject.toml pins it, so that `make` installs it there: 7 GB, and a
minute where $UV names a uv. Prints what patches and modules lack with this Megatron-core; if
nothing, how `make quick` and a dozen comparisons with stock end. `--write` notes that in
`tried.json`, which `fold3d doctor` reads, and in docs/compatibility.md. Exits with 0 if all is
well, 1 if not, 2 if a version could not be installed.
"""

import argparse
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import import_module
from itertools import chain
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[1]
VERSIONS = "megatron/fold3d/upstream/versions.py"
TRIED = ROOT / "megatron/fold3d/upstream/tried.json"
PAGE = ROOT / "docs/compatibility.md"
PAIRS = ("2.9.1:0.17.1", "2.14.1:0.19.2")
# Of the table of comparisons, a dozen rows: schedules, DP.sync, layers in which versions differ.
ROWS = (
    "breadth-first or afab or shifted or layout or latent or instances or held or experts or fp16"
)
TESTS = (
    ("quick",),
    ("test", f"ARGS=tests/end_to_end/test_equal_to_stock.py -q -n 2 -k '{ROWS}'"),
)
PACKAGES = ("megatron/fold3d/runtime", "megatron/fold3d/training", "fold3d_patches")
_INSIDE = "--inside"  # this file calls itself in the copy
_ANY = ">=0.dev0"  # pre-releases too
_PLACE = re.compile(r"(?<=<!-- tried -->\n).*?(?=<!-- -->\n)", re.S)
_NAMES = ("megatron-core", "torch")


def main(argv: Sequence[str] | None = None) -> int:
    """Try each pair; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pairs", nargs="*", metavar="TORCH:MEGATRON", default=PAIRS)
    parser.add_argument("--keep", type=Path, default=ROOT / "build/versions", metavar="DIR")
    parser.add_argument("--lacking", action="store_true", help="run no tests")
    parser.add_argument("--tests", help="words for pytest, instead of make quick and a dozen rows")
    parser.add_argument("--write", action="store_true", help="note how the tests ended")
    args = parser.parse_args(argv)
    tests: Sequence[Sequence[str]] = () if args.lacking else TESTS
    if args.tests:
        tests = [("test", f"ARGS={args.tests}")]
    codes = {try_pair(pair, args.keep, tests, writes=args.write) for pair in args.pairs}
    return 1 if 1 in codes else max(codes)


def try_pair(pair: str, keep: Path, tests: Sequence[Sequence[str]], *, writes: bool) -> int:
    """Make the copy of a pair and try it; returns the exit code.

    Args:
        keep: the folder of all copies.
        tests: words for ``make``.
        writes: whether to note how the tests ended.
    """
    torch, _, megatron = pair.partition(":")
    checkout = Path(megatron).absolute() if os.sep in megatron else None
    tree = keep.absolute() / f"torch{torch}-megatron{checkout.name if checkout else megatron}"
    _copy(tree)
    _pin(tree, "torch", torch)
    _pin(tree, "megatron-core", _ANY if checkout or megatron == "newest" else megatron)
    path = str(checkout or "")
    if _run(tree, path, "scripts/venv.sh")[1]:
        print(f"skipped: {tree.name} could not be installed, for the reason above", flush=True)
        return 2
    found, code = _run(tree, path, ".venv/bin/python", "-m", "scripts.try_versions", _INSIDE)
    row = json.loads(found.splitlines()[-1])
    name = f"torch {row['torch']}, megatron-core {row['megatron-core']}"
    if code or not tests:
        print(f"{name}: {'lacks the above' if code else 'all patches fit'}", flush=True)
        return code
    ended = [_run(tree, path, "make", *words) for words in tests]
    counts = (re.findall(r"\d+ (?:passed|failed|error)", said[-300:]) for said, _ in ended)
    row["result"] = ", ".join(chain(*counts))
    print(f"{name}: {row['result']}", flush=True)
    if writes:
        _note(row)
    return int(any(code for _, code in ended))


def _copy(tree: Path) -> None:
    """Copy what git knows of the work tree, or would add; what was built there stays."""
    tree.mkdir(parents=True, exist_ok=True)
    for old in tree.iterdir():
        if old.name not in (".venv", "build"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def _pin(tree: Path, package: str, version: str) -> None:
    """Pin a version in a copy, and widen the ranges there that leave it out."""
    if not version:
        return
    pin = version if version == _ANY else f"=={version}"
    project = (tree / "pyproject.toml").read_text(encoding="utf-8")
    # Megatron-core before 0.18 wants an older one than the tests of this environment.
    project = project.replace('"transformers==', '"transformers<=')
    project = re.sub(rf'"{package}==[^"]*"', f'"{package}{pin}"', project)
    (allowed,) = re.findall(rf'"{package}(?:\[training\])?(>=[^"]+,[^"]+)"', project)
    if version == _ANY or version not in SpecifierSet(allowed):
        project = project.replace(allowed, _ANY)
        ours = tree / VERSIONS
        ours.write_text(ours.read_text(encoding="utf-8").replace(allowed, _ANY), encoding="utf-8")
    (tree / "pyproject.toml").write_text(project, encoding="utf-8")


def _run(tree: Path, path: str, *command: str) -> tuple[str, int]:
    """Run a command in a copy; return what it said, which is shown if it fails, and its code.

    Args:
        path: a folder that comes before all that Python imports.
    """
    unset = ("MAKEFLAGS", "PYTHONDONTWRITEBYTECODE")  # uv compiles nothing, so imports shall
    outer = {name: word for name, word in os.environ.items() if name not in unset}
    done = subprocess.run(
        command,
        cwd=tree,
        env={**outer, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout, flush=True)
    return done.stdout, done.returncode


def inside() -> int:
    """Print what the Megatron-core of this environment lacks, and last the pair, as JSON."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from megatron.core.package_info import __version__
    from torch.version import __version__ as torch_version

    lacking = [*_of_modules(), *_of_patches()]
    print("\n".join(lacking))
    found = zip(_NAMES, (__version__, torch_version), strict=True)
    print(json.dumps({name: Version(version).base_version for name, version in found}))
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


def _note(row: dict[str, str]) -> None:
    """Note how a pair ended, in place of an earlier time, and print all pairs into the page."""
    row["date"] = datetime.now(tz=UTC).date().isoformat()
    others = [
        other
        for other in json.loads(TRIED.read_text())
        if any(other[name] != row[name] for name in _NAMES)
    ]
    rows = sorted([*others, row], key=lambda tried: [Version(tried[name]) for name in _NAMES])
    TRIED.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(printed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def printed(page: str) -> str:
    """Return a page whose table of tried pairs is that of the file."""
    return _PLACE.sub("".join(f"{line}\n" for line in _table()), page)


def _table() -> Iterator[str]:
    columns = (*_NAMES, "date", "result")
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in json.loads(TRIED.read_text()):
        yield f"| {' | '.join(row[name] for name in columns)} |"


if __name__ == "__main__":
    sys.exit(inside() if sys.argv[1:] == [_INSIDE] else main())

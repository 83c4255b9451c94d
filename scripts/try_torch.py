"""Which tests pass with other versions of torch and Megatron-core; this environment stays as it is.

    .venv/bin/python scripts/try_torch.py                          # the oldest and the newest pair
    .venv/bin/python scripts/try_torch.py 2.10.0 2.14.1:0.18.2 --keep ~/versions
    .venv/bin/python scripts/try_torch.py --short --keep ~/versions  # make test-versions

Puts each version, torch with what it depends on, into a folder in front of all that Python imports.
Builds the C++ scheduler for it in a copy of the work tree, and runs tests there. Prints one row per
pair; `--write` notes it in `tried.json`, which `fold3d doctor` reads, and in docs/compatibility.md.
Exits with 0 if all is well, 1 if not, 2 if a version cannot be installed. A torch takes 6 GB, a
pair ten minutes; `--short` tries only the patches and a dozen comparisons, in two.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
TRIED = ROOT / "megatron/fold3d/upstream/tried.json"
PAGE = ROOT / "docs/compatibility.md"
PAIRS = ("2.9.1:0.17.1", "2.14.1:0.19.2")
MEGATRON = "0.19.2"
TESTS = ("tests/patches", "tests/gpu_path")
# Of the table of comparisons, a dozen rows: schedules, DP.sync, layers in which versions differ.
ROWS = (
    "breadth-first or afab or shifted or layout or latent or instances or held or experts or fp16"
)
_PLACE = re.compile(r"(?<=<!-- tried -->\n).*?(?=<!-- -->\n)", re.S)
_TIMEOUT_S = 3600
_NAMES = ("megatron-core", "torch")


def main(argv: Sequence[str] | None = None) -> int:
    """Print how the tests end with each pair; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pairs", nargs="*", metavar="TORCH[:MEGATRON]", default=PAIRS)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the versions there")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="instead of all of these")
    parser.add_argument("--short", action="store_true", help="the patches and a dozen comparisons")
    parser.add_argument("--write", action="store_true", help="note what was tried")
    args = parser.parse_args(argv)
    codes = []
    for pair in args.pairs:
        torch, _, megatron = pair.partition(":")
        wanted = {"torch": torch, "megatron-core": megatron or MEGATRON}
        with TemporaryDirectory(prefix="fold3d-versions-") as temporary:
            folders = [_installed(args.keep or Path(temporary), *each) for each in wanted.items()]
            if None in folders:
                return 2
            tree = Path(temporary, "fold3d")
            _copy(tree)
            runs = [args.tests]
            if args.short:
                runs = [TESTS[:1], ("tests/end_to_end/test_equal_to_stock.py", "-k", ROWS)]
            else:
                _run(tree, [*filter(None, folders)], ("setup.py", "-q", "build_ext", "--inplace"))
            told, code = _tried(tree, [*filter(None, folders)], runs)
            print(f"torch {torch}, megatron-core {wanted['megatron-core']}: {told}", flush=True)
            codes.append(code)
            if args.write:
                what = "--short" if args.short else " ".join(args.tests)
                _note({**wanted, "tests": what, "result": told})
    return int(any(codes))


def _installed(folder: Path, package: str, version: str) -> Path | None:
    """Put a version into a folder, unless it is there; of Megatron-core without what it needs."""
    place = folder / f"{package}-{version}"
    if (place / "done").exists():
        return place
    alone = ["--no-deps"] if package == "megatron-core" else []
    if not installed(place, *alone, f"{package}=={version}"):
        return None
    (place / "done").touch()
    return place


def installed(folder: Path, *wanted: str) -> bool:
    """Put packages into a folder, with options of pip; tell whether they are there."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder))
    return subprocess.run((*pip, *wanted), check=False).returncode == 0


def _copy(tree: Path) -> None:
    """Copy what git knows of the work tree, or would add."""
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def _tried(tree: Path, folders: Sequence[Path], runs: Sequence[Sequence[str]]) -> tuple[str, int]:
    """Return how each run of tests ended, and the exit code of the last one that fails."""
    said, code = list[str](), 0
    for run in runs:
        pytest = ("-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider")
        done = _run(tree, folders, (*pytest, *run))
        said += re.findall(r"\d+ (?:passed|failed|error)", done.stdout[-200:])
        code = done.returncode or code
    return ", ".join(said), code


def _run(
    tree: Path, folders: Sequence[Path], command: Sequence[str]
) -> subprocess.CompletedProcess[str]:
    """Run Python in the copy with these versions; show what it said if it fails."""
    done = python(tree, folders, command, shows=False)
    if done.returncode:
        print(done.stdout)
    return done


def python(
    tree: Path, folders: Sequence[Path], command: Sequence[str], *, shows: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run Python in a tree, which comes first among what it imports, and then these folders."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tree, *folders)))},
        stdout=None if shows else subprocess.PIPE,
        stderr=None if shows else subprocess.STDOUT,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )


def _note(row: dict[str, Any]) -> None:
    """Note how a pair ended, in place of an earlier time, and print all pairs into the page."""
    row["date"] = datetime.now(tz=UTC).date().isoformat()
    others = [
        other
        for other in json.loads(TRIED.read_text())
        if any(other[name] != row[name] for name in _NAMES)
    ]
    rows = sorted([*others, row], key=_place)
    TRIED.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(printed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def _place(row: dict[str, Any]) -> list[list[int]]:
    return [[*map(int, row[name].split("."))] for name in _NAMES]


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
    sys.exit(main())

"""Which tests pass with other versions of torch, without changing this environment.

    .venv/bin/python scripts/try_torch.py                # the pinned and the newest
    .venv/bin/python scripts/try_torch.py 2.14.1 --keep ~/torches

Puts each version, with what it depends on, into a folder in front of all that Python imports.
Builds the C++ scheduler for it in a copy of the work tree, and runs `tests/patches` and
`tests/gpu_path` there. Prints one row per version. Exits with 0 if all is well, 1 if not, 2 if a
version cannot be installed, so a CI job can call it. A version takes 6 GB and ten minutes.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
VERSIONS = ("2.13.0", "2.15.0")
TESTS = ("tests/patches", "tests/gpu_path")
_TIMEOUT_S = 3600


def main(argv: Sequence[str] | None = None) -> int:
    """Print how the tests end with each version; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", default=VERSIONS)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the versions there")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="instead of all of these")
    args = parser.parse_args(argv)
    rows = []
    for version in args.versions:
        with TemporaryDirectory(prefix="fold3d-torch-") as temporary:
            folder = (args.keep or Path(temporary)) / version
            if not _install(version, folder):
                return 2
            tree = Path(temporary, "fold3d")
            _copy(tree)
            rows.append((version, *_tried(tree, folder, args.tests)))
            print("torch {}: {}".format(*rows[-1]), flush=True)
    return int(any(code for *_, code in rows))


def _install(version: str, folder: Path) -> bool:
    """Put a version and what it depends on into a folder, unless it is there."""
    if (folder / "torch/version.py").is_file():
        return True
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    return subprocess.run([*pip, f"torch=={version}"], check=False).returncode == 0


def _copy(tree: Path) -> None:
    """Copy what git knows of the work tree, or would add."""
    listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)


def _tried(tree: Path, folder: Path, tests: Sequence[str]) -> tuple[str, int]:
    """Return the last line of the first step that fails, or of the tests, and the exit code."""
    last, code = "", 0
    for command in (
        ("setup.py", "-q", "build_ext", "--inplace"),
        ("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests),
    ):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *command],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tree, folder)))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
        code = done.returncode
        last = next(iter(reversed(done.stdout.split("\n")[:-1])), "")
        if code:
            print(done.stdout)
            break
    return last, code


if __name__ == "__main__":
    sys.exit(main())

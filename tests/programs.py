"""Run a program as a shell would, and see what it says."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def ran(
    *words: str | Path, cwd: Path = ROOT, timeout_s: float = 280.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever that is, with more in its environment."""
    return subprocess.run(
        words,
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def printed(*words: str | Path, cwd: Path = ROOT, **environment: str) -> str:
    """Return what a program prints that ends well."""
    done = ran(*words, cwd=cwd, **environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-8000:]
    return done.stdout

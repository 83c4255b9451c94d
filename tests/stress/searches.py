"""Run each `fold3d search` of the pages, which take too long for `make test`.

    .venv/bin/python -m tests.stress.searches
    .venv/bin/python -m tests.stress.searches README.md

`tests/test_docs.py` runs the other commands. A search of a user's own script is left out.
"""

import subprocess
import sys
from collections.abc import Sequence

from tests.test_docs import COMMANDS, FOLD3D, Command


def searches(pages: Sequence[str]) -> list[Command]:
    """List the searches on these pages, or on all."""
    found = [c for c in COMMANDS if c.words[:2] == ("fold3d", "search")]
    return [c for c in found if "--from-script" not in c.words and (not pages or c.page in pages)]


def main(pages: Sequence[str]) -> int:
    """Print what each search ends with; returns the exit code."""
    failed = 0
    for command in searches(pages):
        print(f"== {command}", flush=True)
        done = subprocess.run(
            [FOLD3D, *command.words[1:]], stdout=subprocess.PIPE, text=True, check=False
        )
        failed += done.returncode != 0
        print(done.stdout.strip().splitlines()[-1] if done.stdout else done.returncode)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

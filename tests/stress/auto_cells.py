"""What ``--schedule auto`` finds in ten cells of the testbed is not slower than it was.

.venv/bin/python -m tests.stress.auto_cells
.venv/bin/python -m tests.stress.auto_cells 0.1
"""

import json
import subprocess
import sys
from collections.abc import Sequence

from tests.test_docs import FOLD3D

JOB = (
    "simulate --schedule auto --pp 2 --segments 8 --microbatches 8 --model testbed "
    "--layer-forward-s 0.012 --fp32 --json"
)
SHARDED = "--distributed-optimizer"
# Seconds of the search by stages that this one replaces, by Gb/s and flags.
KNOWN_S = {
    ("0.09", ""): 2.8957,
    ("0.1", ""): 2.6783,
    ("0.125", ""): 2.3974,
    ("0.175", ""): 2.3581,
    ("0.35", ""): 2.3514,
    ("0.09", SHARDED): 2.9385,
    ("0.1", SHARDED): 2.7144,
    ("0.125", SHARDED): 2.5078,
    ("0.175", SHARDED): 2.3842,
    ("0.35", SHARDED): 2.3529,
}
DIGIT_S = 1e-4


def main(rates: Sequence[str]) -> int:
    """Print the fastest choice of each cell; returns the exit code."""
    slower = 0
    for (rate, flags), known_s in KNOWN_S.items():
        if rates and rate not in rates:
            continue
        words = [*JOB.split(), "--cluster", f"testbedx4-{rate}g", *flags.split()]
        done = subprocess.run([FOLD3D, *words], stdout=subprocess.PIPE, text=True, check=True)
        best = min(json.loads(done.stdout)["tries"], key=lambda one: one["seconds"])
        slower += best["seconds"] > known_s + DIGIT_S
        print(f"{rate} {flags}: {best['seconds']:.4f} s, was {known_s}: {best['schedule']}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

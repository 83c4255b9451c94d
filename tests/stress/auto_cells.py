"""What ``--schedule auto`` finds in ten cells of the testbed, and whether anything is faster.

.venv/bin/python -m tests.stress.auto_cells
.venv/bin/python -m tests.stress.auto_cells --rates 0.1
.venv/bin/python -m tests.stress.auto_cells --every

Without ``--every`` the cells have eight segments, and no choice may be slower than the one that the
search by stages found, which this one replaced. With it they have four, and so have four jobs more;
all choices but those with weight gradients in gaps are simulated, and none may be faster.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import product
from math import inf
from unittest.mock import patch

from megatron.fold3d.cli import main as fold3d
from megatron.fold3d.commands import auto_tries
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.predict.search.descent import Descent, JudgeOf, Space

JOB = "simulate --schedule auto --pp 2 --microbatches 8 --model testbed --fp32"
PACED = "--layer-forward-s 0.012"
SHARDED = "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce"
# Seconds of the search by stages, by Gb/s and flags.
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
OTHERS = (
    ("0.05", "--recompute full"),
    ("0.2", "--microbatches 5"),
    ("0.125", f"{SHARDED} --untie-embeddings-and-output-weights"),
    ("1", f"{SHARDED} --microbatches 12"),
)
DIGIT_S = 1e-4


def search(rate: str, flags: str, segments: int) -> Descent:
    """Return the search that `fold3d simulate` makes of a cell."""
    found: list[Descent] = []

    def kept(judge: JudgeOf, space: Space) -> Descent:
        found.append(Descent(judge, space))
        return found[-1]

    words = f"{JOB} {PACED} --segments {segments} --cluster testbedx4-{rate}g {flags}"
    with patch.object(auto_tries, "Descent", kept), redirect_stdout(StringIO()):
        assert fold3d(shlex.split(words)) == 0
    return found[0]


def every(found: Descent) -> Iterator[Choice]:
    """Yield all choices of a space, but for weight gradients in gaps."""
    space, number = found.space, len(found.space.first.segments)
    for order, step in product(space.orders, space.free.get("step", ("end",))):
        for states in product(space.states, repeat=number):
            choice = order.changed(step=step)
            for segment, state in enumerate(states):
                choice = choice.changed((segment,), **state)
            ends = choice.segments[0].optimizer, choice.segments[-1].optimizer
            if not space.tied or ends[0] == ends[1]:
                yield choice


def main(argv: Sequence[str] | None = None) -> int:
    """Print the fastest choice of each cell; returns 1 if another one is faster."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--rates", nargs="*", default=[], metavar="GB", help="Gb/s (all)")
    options.add_argument("--every", action="store_true", help="simulate all choices of 4 segments")
    args = options.parse_args(argv)
    slower = 0
    for (rate, flags), known_s in (KNOWN_S | dict.fromkeys(OTHERS, inf)).items():
        if (args.rates and rate not in args.rates) or (known_s == inf and not args.every):
            continue
        found = search(rate, flags, segments=4 if args.every else 8)
        if not args.every:
            best = min(found.to_try(), key=lambda one: one.seconds)
            slower += best.seconds > known_s + DIGIT_S
            print(f"{rate} {flags}: {best.seconds:.4f} s, was {known_s}: {best.choice}", flush=True)
            continue
        own = [choice for choice in found.found if not choice.fills_gaps]
        least = min(map(found.price, own))
        all_ = Descent(found.judge, found.space, most_actions=sys.maxsize)
        prices = {choice: all_.price(choice) for choice in every(found)}
        fastest = min(prices, key=prices.__getitem__)
        slower += prices[fastest] < least * (1 - 1e-9)
        print(
            f"{rate} {flags}: {least:.4f} s of {len(own)} choices, {prices[fastest]:.4f} s of "
            f"{len(prices)}: {fastest}",
            flush=True,
        )
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())

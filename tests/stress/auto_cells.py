"""What ``--schedule auto`` finds in ten cells of the testbed, and whether anything is faster.

.venv/bin/python -m tests.stress.auto_cells
.venv/bin/python -m tests.stress.auto_cells --rates 0.1
.venv/bin/python -m tests.stress.auto_cells --every

Without ``--every`` the cells have eight segments, and no choice may cost more than one that is
known to be good. With it they have four, and so have four jobs more; all choices but those with
weight gradients in gaps are simulated, and none may be faster.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from io import StringIO
from itertools import product
from unittest.mock import patch

from megatron.fold3d.cli import main as fold3d
from megatron.fold3d.commands import auto_tries
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.predict.search.descent import Descent, JudgeOf, Space

JOB = "simulate --schedule auto --pp 2 --microbatches 8 --model testbed --fp32"
PACED = "--layer-forward-s 0.012"
SHARDED = "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce"
# What the first search of this kind found in them (80463327), by Gb/s and flags.
KNOWN = {
    ("0.09", ""): "aiao:step=next:wgrad=behind@6,7",
    ("0.1", ""): "aiao:step=next:wgrad=behind@1-7",
    ("0.125", ""): "aiao:step=next:wgrad=behind@0,1,3,4,6:wgrad=last@2,5,7",
    ("0.175", ""): "aiao:step=next:wgrad=behind@0-6:wgrad=last@7",
    ("0.35", ""): "aiao:step=next:wgrad=behind@0-6:wgrad=last@7",
    ("0.09", SHARDED): "aiao:optimizer=replicated@4,6:wgrad=behind@6,7",
    ("0.1", SHARDED): "aiao:optimizer=replicated@1,3,6:wgrad=behind",
    ("0.125", SHARDED): "aiao:optimizer=replicated@0,2,6,7:wgrad=behind",
    ("0.175", SHARDED): "aiao:optimizer=replicated@0,7:wgrad=behind@0,2-5,7:wgrad=last@1,6",
    ("0.35", SHARDED): "aiao:optimizer=replicated@0,7:wgrad=behind",
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
    for (rate, flags), known in (KNOWN | dict.fromkeys(OTHERS, "")).items():
        if (args.rates and rate not in args.rates) or not (known or args.every):
            continue
        found = search(rate, flags, segments=4 if args.every else 8)
        all_ = Descent(found.judge, found.space, most_actions=sys.maxsize)
        if not args.every:
            best = found.best.choice
            least, before = map(all_.price, (best, Choice.parse(known, 8)))
            slower += least > before + DIGIT_S
            print(f"{rate} {flags}: {least:.4f} s: {best}; {before:.4f} s: {known}", flush=True)
            continue
        own = [choice for choice in found.found if not choice.fills_gaps]
        least = min(map(found.price, own))
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

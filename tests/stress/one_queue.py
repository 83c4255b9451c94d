"""Play every plan of ours on GPUs with one hardware queue, and list those that do not end.

    .venv/bin/python -m tests.stress.one_queue --schedules aiao 1f1b
    .venv/bin/python -m tests.stress.one_queue --seconds 600 --seed 7

With `--seconds` it plays as many as that allows, in random order.
The plans are those of all schedules with up to 8 ranks, 4 segments and 16 micro-batches, each with
what training adds to it there (`EXTRAS`). Every other one has tensor parallelism. The rules are
those of `megatron.fold3d.plan.device_queues`.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, product
from math import inf
from random import Random
from typing import Any, NamedTuple

from megatron.fold3d.plan.ir import Plan, PlanError
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.plan.schedules import (
    FORWARDS_AHEAD,
    ONE_SEGMENT_SCHEDULES,
    SCHEDULES,
    SPLIT_SCHEDULES,
    build,
)
from megatron.fold3d.predict.simulator.device_run import verify_on_device
from tests.plans import planned
from tests.stress.program import until

MOST_RANKS, MOST_SEGMENTS, MOST_MICROBATCHES = 8, 4, 16


def _shares(share: float) -> tuple[float, ...]:
    return (share,) * (MOST_RANKS * MOST_SEGMENTS)


EXTRAS: dict[str, dict[str, Any] | None] = {
    "transfers alone": None,
    "DP.sync": {},
    "DP.sync at the end": {"grad_sync": "serial"},
    "distributed optimizer": {"gathers_params": True},
    "deferred": {"parts": "step=next"},
    "deferred in slices": {"parts": "step=next:slices=on", "shares": _shares(0.7)},
    "deferred in slices, distributed optimizer": {
        "parts": "step=next:slices=on",
        "shares": _shares(1.0),
        "gathers_params": True,
    },
    "delayed": {"parts": "wgrad=last@0"},
    "delayed, deferred in slices": {
        "parts": "step=next:wgrad=last@0:slices=on",
        "shares": _shares(0.5),
    },
    "offloaded": {"offload": OffloadChoice()},
    "offloaded, delayed, deferred in slices": {
        "offload": OffloadChoice(at_most=3, depth=2),
        "parts": "step=next:wgrad=last@0:slices=on",
        "shares": _shares(0.5),
    },
}
"""What is added to an order; None adds transfers alone."""


class Case(NamedTuple):
    """A plan: arguments of `build`, and what is added."""

    schedule: str
    sizes: dict[str, Any]
    extra: str
    tensor_parallel: bool

    def plan(self) -> Plan:
        """Return it as training runs it with one queue."""
        order, extra = build(self.schedule, **self.sizes), EXTRAS[self.extra]
        return order if extra is None else planned(order, **extra, receives_late=True)


def cases(schedules: Sequence[str] = SCHEDULES) -> Iterator[Case]:
    """Yield every case of some schedules; every other one has tensor parallelism."""
    number = 0
    for schedule in schedules:
        one_segment = schedule in ONE_SEGMENT_SCHEDULES
        segments = range(1, 2 if one_segment else MOST_SEGMENTS + 1)
        sizes = product(range(1, MOST_RANKS + 1), segments, range(1, MOST_MICROBATCHES + 1))
        for (ranks, ns, microbatches), extra in product(sizes, EXTRAS):
            if schedule in SPLIT_SCHEDULES and extra.startswith("delayed"):
                continue  # its weight gradients are apart already
            known = {"num_ranks": ranks, "num_segments": ns, "num_microbatches": microbatches}
            for variant in _variants(schedule, ranks):
                number += 1
                yield Case(schedule, {**known, **variant}, extra, bool(number % 2))


def _variants(schedule: str, ranks: int) -> Iterator[dict[str, Any]]:
    yield {}
    if schedule == "interleaved":
        yield {"group_size": ranks + 1}
    if schedule in FORWARDS_AHEAD:
        yield {"forwards_ahead": FORWARDS_AHEAD[schedule] + 1}


def main() -> int:
    """Return 1 if a plan does not end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)
    parser.add_argument("--every", type=int, default=1, help="play one of so many")
    parser.add_argument("--seconds", type=float, help="stop after that; all plans by default")
    parser.add_argument("--seed", type=int, default=0, help="of the order, with --seconds")
    options = parser.parse_args()
    among: Iterable[Case] = islice(cases(options.schedules), 0, None, options.every)
    ends = inf
    if options.seconds is not None:
        among, ends = list(among), time.monotonic() + options.seconds
        Random(options.seed).shuffle(among)
    played: Counter[str] = Counter()
    num_rejected = 0
    for case in until(ends, among):
        played[case.schedule] += 1
        try:
            verify_on_device(case.plan(), 1, tensor_parallel=case.tensor_parallel)
        except PlanError as error:
            num_rejected += 1
            print(f"{case}: {error}", flush=True)
    print(", ".join(f"{schedule} {count}" for schedule, count in played.items()))
    print(f"{played.total()} plans with one hardware queue, {num_rejected} of them do not end")
    return int(bool(num_rejected))


if __name__ == "__main__":
    sys.exit(main())

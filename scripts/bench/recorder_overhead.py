"""What it costs to record an event of a trace, and what it costs not to.

    .venv/bin/python -m scripts.bench.recorder_overhead

On a GPU an event is two CUDA events more, on a CPU two looks at the clock. Divide by the actions of
an iteration and its time for the share of it.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from statistics import median

import torch

from megatron.fold3d.plan.ir import Action
from megatron.fold3d.runtime.trace.recorder import Recorder

ROUNDS = 9


def microseconds(recorder: Recorder, iteration: int, events: int) -> float:
    """Return what an event of an iteration costs the host."""
    actions = [Action.from_str(f"0F{number}") for number in range(events)]
    with recorder.iteration(iteration):
        start_s = time.thread_time()  # a busy machine does not count
        for action in actions:
            with recorder.span(action, "compute"):
                pass
        return (time.thread_time() - start_s) / events * 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Time recorded and unrecorded events in turn; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=int, default=10_000, metavar="N", help="per iteration")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    recorder = Recorder(device, lambda number: number % 2 == 1, lambda _: None)
    times = [microseconds(recorder, number, args.events) for number in range(2 * ROUNDS)]
    for name, of_kind in (("recorded", times[1::2]), ("not recorded", times[::2])):
        print(f"{name:12} {median(of_kind):6.2f} us per event on {device.type}, median of {ROUNDS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Does a launch that waits hold up what is launched behind it, on another stream?

    CUDA_DEVICE_MAX_CONNECTIONS=1 .venv/bin/python -m scripts.bench.queues

One stream runs a long kernel, and a second one waits for it by an event. Then a short kernel is
launched on a third. Prints when the short one ended: at once with a hardware queue per stream,
behind the long one where streams share a queue, which is what `docs/gpu.md` assumes of one queue.
The host asks for both ends all the time, by events without timing. Needs a GPU; an H200 does what
is said here.

    CUDA_DEVICE_MAX_CONNECTIONS=1 .venv/bin/python -m scripts.bench.queues --timed-event

Here nothing waits for the long kernel but an event with timing that is recorded behind it. It
should hold up the short kernel where streams share a queue: so nothing of ours times an event.

Fails if the GPU does otherwise.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

LONG_CYCLES, SHORT_CYCLES = 400_000_000, 1_000
BLOCKED = 0.5  # of the long kernel's time
WAITED, FREE = "it waited", "it did not wait"


def main(argv: Sequence[str]) -> int:
    """Print one line; returns 1 if it is not the expected one, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--timed-event", action="store_true", help="time an event; none waits")
    timed = parser.parse_args(argv).timed_event
    if not torch.cuda.is_available():
        print(
            "queues: error: torch sees no GPU, and only a GPU has hardware queues", file=sys.stderr
        )
        return 2
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8, the default")
    long_ms, short_ms = times_ms(torch.cuda, timed=timed)
    found = verdict(long_ms, short_ms)
    print(
        f"CUDA_DEVICE_MAX_CONNECTIONS={connections}: a launch behind a "
        f"{'timed event' if timed else 'blocked launch'} ended after {short_ms:.1f} ms of "
        f"{long_ms:.1f}: {found}"
    )
    return int(found != (WAITED if connections == "1" else FREE))


def times_ms(cuda: Any, *, timed: bool = False) -> tuple[float, float]:
    """Return when a long kernel ended, and a short one that was launched behind what waits for it.

    Args:
        cuda: ``torch.cuda``, or what has its streams and events and ``_sleep``.
        timed: whether it is an event with timing that waits, and not a kernel.
    """
    first, blocked, free = cuda.Stream(), cuda.Stream(), cuda.Stream()
    long_end, short_end = cuda.Event(), cuda.Event()
    for stream in (first, blocked, free):  # the first launch on a stream takes longer
        with cuda.stream(stream):
            cuda._sleep(SHORT_CYCLES)
    cuda.synchronize()
    begin_s = time.perf_counter()
    with cuda.stream(first):
        cuda._sleep(LONG_CYCLES)
        long_end.record(first)
    if timed:
        cuda.Event(enable_timing=True).record(first)
    else:
        blocked.wait_event(long_end)
        with cuda.stream(blocked):
            cuda._sleep(SHORT_CYCLES)
    with cuda.stream(free):
        cuda._sleep(SHORT_CYCLES)
        short_end.record(free)
    ended_ms: dict[Any, float] = {}
    while len(ended_ms) < 2:
        for event in (long_end, short_end):
            if event not in ended_ms and event.query():
                ended_ms[event] = (time.perf_counter() - begin_s) * 1e3
    return ended_ms[long_end], ended_ms[short_end]


def verdict(long_ms: float, short_ms: float) -> str:
    """Say what the times mean."""
    return WAITED if short_ms > BLOCKED * long_ms else FREE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

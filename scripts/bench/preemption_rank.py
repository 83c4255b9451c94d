"""One rank of `scripts.bench.preemption`: transfers of a pipeline beside DP.sync of its replicas.

Latency runs from the sender's call to the receiver's return from ``wait``; all hosts are one
machine's, so they share a clock. DP.sync is counted on the wire of the senders, headers included.
"""

import contextlib
import json
import logging
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.fold3d.runtime.preemption.communicator import PreemptiveCommunicator
from scripts.bench.processes import hurry, sleep_until
from scripts.bench.testbed import traffic_of

_BUCKET_BYTES = 8 << 20
_SETTLE_S = 1.5  # between two modes: TCP forgets the one before, schedulers learn
HEADERS = 1.005  # bytes on the wire for each that is sent


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run both kinds of traffic."""

    name: str
    transfers: bool = True
    reduces: bool = True
    preempts: bool = False
    announced: bool = False
    aligned: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What every rank does."""

    data_parallel: int
    transfer_bytes: int
    period_s: float
    announced_s: float
    duration_s: float
    slice_bytes: int

    @property
    def transfers_bytes_s(self) -> float:
        """What the transfers put on a link."""
        return self.transfer_bytes / self.period_s * HEADERS


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One mode, once: seconds of each transfer, bytes per second that a sender reduces."""

    mode: str
    latencies_s: tuple[float, ...]
    reduced_bytes_s: float
    paused_share: float = 0.0


class Rank:
    """The groups of one rank, twice: as they are, and with a scheduler."""

    def __init__(self, load: Load) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        self.load, self.rank, dp = load, dist.get_rank(), load.data_parallel
        self.is_sender = self.rank < dp
        self.replica = self.rank % dp
        stages = [dist.new_group(range(stage * dp, stage * dp + dp)) for stage in range(2)]
        pairs = [dist.new_group([replica, replica + dp]) for replica in range(dp)]
        self._stage, self._pair = stages[not self.is_sender], pairs[self.replica]
        self.communicator = PreemptiveCommunicator(
            slice_bytes=load.slice_bytes, timeout=timedelta(seconds=60)
        )
        ring = {self.rank // dp * dp + (self.replica + 1) % dp, (self.rank + dp) % (2 * dp)}
        self.communicator.connect(ring)
        self._scheduled = [self.communicator.group(g) for g in (self._stage, self._pair)]

    def run(self, mode: Mode) -> dict[str, Any]:
        """Run a mode for its time; what this rank saw of it."""
        stage, pair = self._scheduled if mode.preempts else (self._stage, self._pair)
        dist.barrier()
        start_s = self._agree(time.monotonic() + 0.3) + _SETTLE_S
        end_s = start_s + self.load.duration_s
        reducing = threading.Thread(target=_reduce_until, args=(stage, end_s, mode.preempts))
        if mode.reduces:
            reducing.start()
        hurry(os.getpid())
        seen: dict[str, Any] = {"moments_s": []}
        with self._counted(start_s, seen):
            if mode.transfers:
                seen["moments_s"] = self._transfer(mode, pair, start_s, end_s)
            sleep_until(end_s)
        if mode.reduces:
            reducing.join()
        return seen

    def _transfer(self, mode: Mode, pair: Any, start_s: float, end_s: float) -> list[float]:
        """Send or receive once per period; the moments at which one was sent or had arrived."""
        load = self.load
        phase_s = 0.0 if mode.aligned else self.replica * load.period_s / load.data_parallel
        tensor = torch.zeros(load.transfer_bytes // 4)
        moments, at_s = [], start_s - _SETTLE_S + phase_s
        while (at_s := at_s + load.period_s) < end_s:
            if not self.is_sender:
                pair.recv([tensor], 0, 0).wait()
                moment_s = time.monotonic()
            else:
                sleep_until(at_s - load.announced_s)
                if mode.announced:
                    pair.announce(1, load.announced_s)
                sleep_until(at_s)
                moment_s = time.monotonic()
                pair.send([tensor], 1, 0).wait()
            if at_s >= start_s:
                moments.append(moment_s)
        return moments

    @contextlib.contextmanager
    def _counted(self, start_s: float, seen: dict[str, Any]) -> Iterator[None]:
        """Count what the link carries and how long slices were held back."""
        first: list[tuple[float, int, float]] = []
        timer = threading.Timer(start_s - time.monotonic(), lambda: first.append(self._reading()))
        timer.start()
        yield
        last = self._reading()
        lasted_s, num_bytes, paused_s = (b - a for a, b in zip(first[0], last, strict=True))
        seen |= {"bytes_s": num_bytes / lasted_s, "paused_share": paused_s / lasted_s}

    def _reading(self) -> tuple[float, int, float]:
        sent_bytes = traffic_of(os.getpid()).sent_bytes
        return time.monotonic(), sent_bytes, self.communicator.statistics().paused_s

    def _agree(self, moment_s: float) -> float:
        moments = [moment_s]
        dist.broadcast_object_list(moments, 0)
        return moments[0]


def run_modes(load: Load, modes: Sequence[Mode]) -> int:
    """One rank: run all modes, and print on rank 0 what all have seen."""
    logging.basicConfig()
    rank = Rank(load)
    with rank.communicator:
        for mode in modes:
            seen: list[dict[str, Any]] = [{}] * dist.get_world_size()
            dist.all_gather_object(seen, rank.run(mode))
            if rank.rank == 0:
                print(json.dumps(asdict(_result(mode, load, seen))))
    return 0


def _result(mode: Mode, load: Load, seen: Sequence[dict[str, Any]]) -> Result:
    dp = load.data_parallel
    latencies = [
        arrived - sent
        for replica in range(dp)
        for sent, arrived in zip(
            seen[replica]["moments_s"], seen[replica + dp]["moments_s"], strict=True
        )
    ]
    transfers = load.transfers_bytes_s if mode.transfers else 0.0
    return Result(
        mode=mode.name,
        latencies_s=tuple(latencies),
        reduced_bytes_s=statistics.mean(s["bytes_s"] for s in seen[:dp]) - transfers,
        paused_share=statistics.mean(s["paused_share"] for s in seen) if mode.preempts else 0.0,
    )


def _reduce_until(group: Any, end_s: float, queued: bool) -> None:
    """Reduce without a pause; the replicas stop together, at the first sum that says so."""
    buckets = [torch.zeros(_BUCKET_BYTES // 4) for _ in range(2 if queued else 1)]
    running: list[tuple[torch.Tensor, Any]] = []
    stop = False
    while not stop or running:
        while not stop and len(running) < len(buckets):
            bucket = next(b for b in buckets if all(b is not other for other, _ in running))
            bucket[-1] = float(time.monotonic() > end_s)
            running.append((bucket, dist.all_reduce(bucket, group=group, async_op=True)))
        bucket, work = running.pop(0)
        work.wait()
        stop |= bool(bucket[-1])

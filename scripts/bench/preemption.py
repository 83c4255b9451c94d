"""How long a transfer between pipeline ranks takes beside DP.sync, and what that costs DP.sync.

    sudo .venv/bin/python -m scripts.bench.preemption --rate 200mbit --transfer-kib 256 --rounds 3

A testbed of 2 x dp hosts: every rank of the first stage sends a tensor to its partner in the
second, once per period, while the replicas of each stage reduce gradients without a pause.
Latency runs from the sender's call to the receiver's return from `wait`; all hosts are one
machine's, so they share a clock. DP.sync is counted on the wire of the senders, headers included.
"""

import argparse
import contextlib
import json
import logging
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.fold3d.runtime.communicator import PreemptiveCommunicator
from scripts.bench.testbed import (
    Link,
    Testbed,
    TestbedError,
    end_on_signals,
    parse_rate,
    refuse,
)

_ROOT = Path(__file__).parents[2]
_BUCKET_BYTES = 8 << 20
_SETTLE_S = 1.5  # between two modes: TCP forgets the one before, schedulers learn


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run both kinds of traffic."""

    name: str
    transfers: bool = True
    reduces: bool = True
    preempts: bool = False
    announced: bool = False
    aligned: bool = True
    loses_control: bool = False  # for good: the last mode


MODES = (
    Mode("transfers alone", reduces=False),
    Mode("DP.sync alone", transfers=False),
    Mode("stock", preempts=False),
    Mode("announced", preempts=True, announced=True),
    Mode("not announced", preempts=True),
    Mode("announced, unaligned", preempts=True, announced=True, aligned=False),
    Mode("control lost", preempts=True, announced=True, loses_control=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What every rank does."""

    data_parallel: int
    transfer_bytes: int
    period_s: float
    announced_s: float
    duration_s: float
    slice_bytes: int
    slices_in_flight: int
    pause_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One mode, once: seconds of each transfer, bytes per second that a sender reduces."""

    mode: str
    latencies_s: tuple[float, ...]
    reduced_bytes_s: float
    paused_share: float = 0.0
    slice_s: float = 0.0


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
            slice_bytes=load.slice_bytes,
            timeout=timedelta(seconds=60),
            slices_in_flight=load.slices_in_flight,
            pause_share=load.pause_share,
        )
        ring = {self.rank // dp * dp + (self.replica + 1) % dp, (self.rank + dp) % (2 * dp)}
        self.communicator.connect(ring)
        self._scheduled = [self.communicator.group(g) for g in (self._stage, self._pair)]

    def run(self, mode: Mode) -> dict[str, Any]:
        """Run a mode for its time; what this rank saw of it."""
        if mode.loses_control:
            self.communicator._links.close()  # from now on no rank hears another
        stage, pair = self._scheduled if mode.preempts else (self._stage, self._pair)
        dist.barrier()
        start_s = self._agree(time.monotonic() + 0.3) + _SETTLE_S
        end_s = start_s + self.load.duration_s
        reducing = threading.Thread(target=_reduce_until, args=(stage, end_s, mode.preempts))
        if mode.reduces:
            reducing.start()
        _hurry()
        seen: dict[str, Any] = {"moments_s": [], "slice_s": 0.0}
        with self._counted(start_s, seen):
            if mode.transfers:
                seen["moments_s"] = self._transfer(mode, pair, start_s, end_s)
            _sleep_until(end_s)
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
                _sleep_until(at_s - load.announced_s)
                if mode.announced:
                    pair.announce(1, load.announced_s)
                _sleep_until(at_s)
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
        seen["slice_s"] = self.communicator.statistics().slice_s

    def _reading(self) -> tuple[float, int, float]:
        for line in Path("/proc/self/net/dev").read_text().splitlines():
            if line.strip().startswith("eth0:"):
                sent = int(line.partition(":")[2].split()[8])
                return time.monotonic(), sent, self.communicator.statistics().paused_s
        raise RuntimeError("no eth0: start this through its main program")

    def _agree(self, moment_s: float) -> float:
        moments = [moment_s]
        dist.broadcast_object_list(moments, 0)
        return moments[0]


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


def _sleep_until(moment_s: float) -> None:
    if (left_s := moment_s - time.monotonic()) > 0:
        time.sleep(left_s)


def _hurry() -> None:
    """Go before all other processes of this machine; threads started later inherit it."""
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(task.name), os.SCHED_RR, os.sched_param(1))


def run_rank(load: Load, modes: Sequence[Mode]) -> int:
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
    transfers_s = load.transfer_bytes / load.period_s * 1.005 if mode.transfers else 0.0  # headers
    return Result(
        mode=mode.name,
        latencies_s=tuple(latencies),
        reduced_bytes_s=statistics.mean(s["bytes_s"] for s in seen[:dp]) - transfers_s,
        paused_share=statistics.mean(s["paused_share"] for s in seen) if mode.preempts else 0.0,
        slice_s=statistics.mean(s["slice_s"] for s in seen) if mode.preempts else 0.0,
    )


def table(results: Sequence[Result], load: Load) -> str:
    """Markdown: a row per mode, over all rounds."""
    by_mode: dict[str, list[Result]] = {}
    for result in results:
        by_mode.setdefault(result.mode, []).append(result)
    alone = _latencies(by_mode.get("transfers alone", []))
    ideal = 0.0
    if "DP.sync alone" in by_mode:
        ideal = _mean(by_mode["DP.sync alone"], lambda r: r.reduced_bytes_s)
        ideal -= load.transfer_bytes / load.period_s * 1.005
    rows = [
        "| | p50 ms | p99 ms | x alone, p50 | p99 | DP.sync MB/s | of ideal | held back |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name, runs in by_mode.items():
        cells = [name]
        if latencies := _latencies(runs):
            p50, p99 = (_quantile(latencies, q) for q in (0.5, 0.99))
            cells += [f"{1e3 * p50:.2f}", f"{1e3 * p99:.2f}"]
            if alone:
                cells += [
                    f"{p50 / _quantile(alone, 0.5):.2f}",
                    f"{p99 / _quantile(alone, 0.99):.2f}",
                ]
        cells += [""] * (5 - len(cells))
        speed = _mean(runs, lambda r: r.reduced_bytes_s)
        has_reduces = name != "transfers alone"
        cells.append(f"{speed / 1e6:.2f}" if has_reduces else "")
        cells.append(f"{speed / ideal:.3f}" if ideal and has_reduces and latencies else "")
        paused = _mean(runs, lambda r: r.paused_share)
        cells.append(f"{paused:.0%}" if paused else "")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _latencies(runs: Sequence[Result]) -> list[float]:
    return [latency for run in runs for latency in run.latencies_s]


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _mean(runs: Sequence[Result], value: Callable[[Result], float]) -> float:
    return statistics.mean(map(value, runs))


def main(argv: Sequence[str]) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="200mbit", help="of each link (200mbit)")
    parser.add_argument("--dp", type=int, default=2, help="replicas of each stage (2)")
    parser.add_argument("--transfer-kib", type=int, default=256, help="(256)")
    parser.add_argument("--period-ms", type=float, default=50.0, help="(50)")
    parser.add_argument("--announced-ms", type=float, default=15.0, help="ahead (15)")
    parser.add_argument("--slice-kib", type=int, default=0, help="(a quarter of a transfer)")
    parser.add_argument("--in-flight", type=int, default=1, help="slices of a group at once (1)")
    parser.add_argument("--pause-share", type=float, default=0.5, help="held back at most (0.5)")
    parser.add_argument("--duration-s", type=float, default=6.0, help="of each mode (6)")
    parser.add_argument("--rounds", type=int, default=1, help="(1)")
    parser.add_argument("--only", nargs="+", default=[], metavar="MODE", help="some modes")
    parser.add_argument("--logs", type=Path, default=_ROOT / "out/preemption")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    args = parser.parse_args(argv)
    end_on_signals()
    load = Load(
        data_parallel=args.dp,
        transfer_bytes=args.transfer_kib << 10,
        period_s=args.period_ms / 1e3,
        announced_s=args.announced_ms / 1e3,
        duration_s=args.duration_s,
        slice_bytes=(args.slice_kib or args.transfer_kib // 4) << 10,
        slices_in_flight=args.in_flight,
        pause_share=args.pause_share,
    )
    modes = [mode for mode in MODES if not args.only or mode.name in args.only]
    results: list[Result] = []
    try:
        link = Link(parse_rate(args.rate))
        for _ in range(args.rounds):
            shutil.rmtree(args.logs, ignore_errors=True)
            with Testbed(2 * args.dp, link) as testbed:
                ranks = testbed.fork(lambda: run_rank(load, modes), args.logs)
                codes = ranks.wait(60 + 3 * len(modes) * args.duration_s)
            if any(code != 0 for code in codes):
                raise TestbedError(f"exit codes {codes}; see {args.logs}")
            lines = (args.logs / "rank0.log").read_text().splitlines()
            found = [json.loads(line) for line in lines if line.startswith("{")]
            results += [Result(**run) for run in found]
            for result in results[-len(found) :]:
                print(
                    f"{result.mode}: a slice takes {1e3 * result.slice_s:.2f} ms", file=sys.stderr
                )
    except (TestbedError, ValueError) as error:
        return refuse("preemption.py", error)
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results]))
    print(table(results, load))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

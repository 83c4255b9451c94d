"""How long a transfer between pipeline ranks takes beside DP.sync, and what that costs DP.sync.

    sudo .venv/bin/python -W ignore -m scripts.bench.preemption --rate 200mbit 1gbit

Testbeds of 2 x dp hosts: every rank of the first stage sends a tensor to its partner in the
second, once per period, while the replicas of each stage reduce gradients without a pause. A table
for each rate, size and number of replicas, with the goals that hold; medians over the rounds.
``--kill`` ends each rank in turn instead, and says after how long the others know.
"""

import argparse
import itertools
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from megatron.fold3d.runtime.preemption.communicator import extension
from scripts.bench.preemption_rank import HEADERS, Load, Mode, Result, run_killed, run_modes
from scripts.bench.processes import check_real_time
from scripts.bench.testbed import (
    Link,
    Testbed,
    TestbedError,
    end_on_signals,
    parse_rate,
    refuse,
)

_ROOT = Path(__file__).parents[2]
ALONE = Mode("transfers alone", reduces=False)
REDUCES = Mode("DP.sync alone", transfers=False)
STOCK = Mode("stock")
ANNOUNCED = Mode("announced", preempts=True, announced=True)
ALONE_OF_TWO = Mode("alone, two classes", reduces=False, marks=True)
MARKED = Mode("marked packets", marks=True)
MODES = (
    ALONE,
    REDUCES,
    STOCK,
    ANNOUNCED,
    Mode("not announced", preempts=True),
    Mode("unaligned", preempts=True, announced=True, aligned=False),
    Mode("control lost", preempts=True, announced=True, loses_control=True),
    ALONE_OF_TWO,
    MARKED,
)


@dataclass(frozen=True, slots=True)
class Goal:
    """A transfer's p50 and p99 against alone, at most; DP.sync against the ideal, at least."""

    p50: float | None
    p99: float | None
    reduced: float

    def __str__(self) -> str:
        latencies = [f"{x:.2f}" for x in (self.p50, self.p99) if x is not None]
        return " / ".join([*latencies, f"{self.reduced:.2f}"])

    def holds(self, p50: float, p99: float, reduced: float) -> bool:
        """Tell whether measured figures reach it."""
        within = (self.p50 is None or p50 <= self.p50) and (self.p99 is None or p99 <= self.p99)
        return within and reduced >= self.reduced


def goal(mode: str, load: Load, rate_bit_s: float) -> Goal | None:
    """Return what a mode should reach."""
    if mode == ANNOUNCED.name and load.data_parallel > 2:
        return Goal(None, None, 0.85)
    if mode == ANNOUNCED.name:
        return Goal(1.05, 1.15, 0.88 if rate_bit_s >= 1e9 else 0.92)
    return {
        "not announced": Goal(1.5, 1.7, 0.94),
        MARKED.name: Goal(1.03, 1.10, 0.98),
        "unaligned": Goal(None, 1.7, 0.85),
        "control lost": Goal(None, None, 0.9),
    }.get(mode)


@dataclass(frozen=True, slots=True)
class Row:
    """A mode over all rounds: medians of what each round measured."""

    mode: str
    p50_s: float
    p99_s: float
    reduced_bytes_s: float
    paused_share: float

    @classmethod
    def of(cls, runs: Sequence[Result]) -> "Row":
        """Summarize the rounds of one mode."""
        spread = [_quantiles(run.latencies_s) for run in runs]
        return cls(
            runs[0].mode,
            median(p50 for p50, _ in spread),
            median(p99 for _, p99 in spread),
            median(run.reduced_bytes_s for run in runs),
            median(run.paused_share for run in runs),
        )


def table(results: Sequence[Result], load: Load, rate_bit_s: float) -> str:
    """Markdown: a row per mode, and how ours compares with stock's."""
    by_mode: dict[str, list[Result]] = {}
    for result in results:
        by_mode.setdefault(result.mode, []).append(result)
    rows = {name: Row.of(runs) for name, runs in by_mode.items()}
    lines = [
        "| | p50 ms | p99 ms | x alone, p50 | p99 | DP.sync MB/s | of ideal | held back | goal |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        *(f"| {' | '.join(_cells(row, rows, load, rate_bit_s))} |" for row in rows.values()),
    ]
    if {STOCK.name, ANNOUNCED.name} <= rows.keys():
        stock, ours = rows[STOCK.name], rows[ANNOUNCED.name]
        lines += [
            "",
            f"Stock over announced: p50 {stock.p50_s / ours.p50_s:.1f} (goal 3), "
            f"p99 {stock.p99_s / ours.p99_s:.1f} (goal 6).",
        ]
    return "\n".join(lines)


def _cells(row: Row, rows: dict[str, Row], load: Load, rate_bit_s: float) -> list[str]:
    alone = rows.get(ALONE_OF_TWO.name if row.mode == MARKED.name else ALONE.name)
    reduces = rows.get(REDUCES.name)
    speed = f"{row.reduced_bytes_s / 1e6:.2f}"
    if row is reduces:
        return [row.mode, "", "", "", "", speed, "", "", ""]
    cells = [row.mode, f"{1e3 * row.p50_s:.2f}", f"{1e3 * row.p99_s:.2f}"]
    if row.mode in (ALONE.name, ALONE_OF_TWO.name):
        return [*cells, "1.00", "1.00", "", "", "", ""]
    if alone is None or reduces is None:
        return [*cells, "", "", speed, "", "", ""]
    p50, p99 = row.p50_s / alone.p50_s, row.p99_s / alone.p99_s
    reduced = row.reduced_bytes_s / (reduces.reduced_bytes_s - load.transfers_bytes_s)
    paused = f"{row.paused_share:.0%}" if row.paused_share else ""
    cells += [f"{p50:.2f}", f"{p99:.2f}", speed, f"{reduced:.3f}", paused]
    wanted = goal(row.mode, load, rate_bit_s)
    if wanted is None:
        return [*cells, ""]
    return [*cells, f"{wanted}: {'holds' if wanted.holds(p50, p99, reduced) else 'missed'}"]


def _quantiles(latencies_s: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(latencies_s) or [0.0]
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def measure(load: Load, rate_bit_s: float, modes: Sequence[Mode], logs: Path) -> Iterator[Result]:
    """Yield one round of all modes; those with marked packets on links that honour marks."""
    for marks, group in itertools.groupby(sorted(modes, key=lambda m: m.marks), lambda m: m.marks):
        chosen = list(group)
        shutil.rmtree(logs, ignore_errors=True)
        with Testbed(2 * load.data_parallel, Link(rate_bit_s, marked_first=marks)) as testbed:
            ranks = testbed.fork(partial(run_modes, load, chosen, marks=marks), logs)
            codes = ranks.wait(60 + 3 * len(chosen) * load.duration_s)
        if any(code != 0 for code in codes):
            raise TestbedError(f"exit codes {codes}; see {logs}")
        lines = (logs / "rank0.log").read_text().splitlines()
        yield from (Result(**json.loads(line)) for line in lines if line.startswith("{"))


def kill(load: Load, rate_bit_s: float, logs: Path) -> Iterator[str]:
    """Yield for each rank after how long the others knew that it is dead."""
    for victim in range(2 * load.data_parallel):
        shutil.rmtree(logs, ignore_errors=True)
        with Testbed(2 * load.data_parallel, Link(rate_bit_s)) as testbed:
            ranks = testbed.fork(partial(run_killed, load, victim), logs)
            ranks.wait(60)
        told = [_last_line(log) for rank, log in enumerate(ranks.logs) if rank != victim]
        latest = max(told, key=lambda one: float(one["told_s"]))
        yield f"rank {victim}: all others after {latest['told_s']:.2f} s; {latest['text']}"


def _last_line(log: Path) -> dict[str, Any]:
    lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {"told_s": inf, "text": "not told"}
    return found


def loads(args: argparse.Namespace) -> Iterator[tuple[str, Load]]:
    """Yield a rate and a load for each table; a transfer takes a fifth of its period by default."""
    for rate, dp, kib in itertools.product(args.rate, args.dp, args.transfer_kib):
        period_s = 5 * (kib << 10) * HEADERS * 8 / (parse_rate(rate) or 1e9)
        if args.period_ms is not None:
            period_s = args.period_ms / 1e3
        ahead_s = 0.3 * period_s if args.announced_ms is None else args.announced_ms / 1e3
        yield (
            rate,
            Load(
                data_parallel=dp,
                transfer_bytes=kib << 10,
                period_s=period_s,
                announced_s=ahead_s,
                duration_s=args.duration_s,
                slice_bytes=(args.slice_kib or kib // 4) << 10,
                slices_in_flight=args.in_flight,
                pause_share=args.pause_share,
            ),
        )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", nargs="+", default=["200mbit"], help="of each link (200mbit)")
    parser.add_argument("--dp", type=int, nargs="+", default=[2], help="replicas of a stage (2)")
    parser.add_argument("--transfer-kib", type=int, nargs="+", default=[256], help="(256)")
    parser.add_argument("--period-ms", type=float, help="(five times what a transfer takes)")
    parser.add_argument("--announced-ms", type=float, help="ahead (0.3 of a period)")
    parser.add_argument("--slice-kib", type=int, default=0, help="(a quarter of a transfer)")
    parser.add_argument("--in-flight", type=int, default=1, help="slices of a group at once (1)")
    parser.add_argument("--pause-share", type=float, default=0.5, help="held back at most (0.5)")
    parser.add_argument("--duration-s", type=float, default=4.0, help="of each mode (4)")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    parser.add_argument("--only", nargs="+", default=[], metavar="MODE", help="some modes")
    parser.add_argument("--kill", action="store_true", help="kill each rank in turn")
    parser.add_argument("--logs", type=Path, default=_ROOT / "out/preemption")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure, and print the tables."""
    args = _parse(argv)
    end_on_signals()
    modes = [mode for mode in MODES if not args.only or mode.name in args.only]
    measured = []
    try:
        check_real_time()  # ranks take it without being asked
        if extension() is None:
            raise ValueError(
                "the extension is not built, and without it nothing waits; run: make extension"
            )
        for rate, load in loads(args):
            rate_bit_s = parse_rate(rate)
            if rate_bit_s is None:
                raise ValueError("--rate unshaped: nothing would share a link; give 200mbit")
            print(
                f"\n{load.transfer_bytes >> 10} KiB every {1e3 * load.period_s:.0f} ms at {rate}, "
                f"{load.data_parallel} replicas\n"
            )
            if args.kill:
                print("\n".join(kill(load, rate_bit_s, args.logs)))
                continue
            results: list[Result] = []
            for _ in range(args.rounds):
                results += measure(load, rate_bit_s, modes, args.logs)
            print(table(results, load, rate_bit_s), flush=True)
            measured.append({"rate": rate, **asdict(load), "runs": [asdict(r) for r in results]})
    except (TestbedError, ValueError) as error:
        return refuse("preemption.py", error)
    if args.json:
        args.json.write_text(json.dumps(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

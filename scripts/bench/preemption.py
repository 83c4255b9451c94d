"""How long a transfer between pipeline ranks takes beside DP.sync, and what that costs DP.sync.

    sudo .venv/bin/python -W ignore -m scripts.bench.preemption --rate 200mbit 1gbit

Testbeds of 2 x dp hosts: every rank of the first stage sends a tensor to its partner in the
second, once per period, while the replicas of each stage reduce gradients without a pause. A table
for each rate, size and number of replicas; medians over the rounds.
"""

import argparse
import itertools
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from megatron.fold3d.runtime.preemption.communicator import extension
from scripts.bench.options import parser_of
from scripts.bench.preemption_rank import HEADERS, Load, Mode, Result, run_modes
from scripts.bench.processes import check_real_time
from scripts.bench.summary import markdown
from scripts.bench.testbed import Link, Testbed, TestbedError, end_on_signals, parse_rate, refuse

ALONE = Mode("transfers alone", reduces=False)
REDUCES = Mode("DP.sync alone", transfers=False)
STOCK = Mode("stock")
ANNOUNCED = Mode("announced", preempts=True, announced=True)
MODES = (
    ALONE,
    REDUCES,
    STOCK,
    ANNOUNCED,
    Mode("not announced", preempts=True),
    Mode("unaligned", preempts=True, announced=True, aligned=False),
)


class Row(NamedTuple):
    """A mode over all rounds: medians of what each round measured."""

    mode: str
    p50_s: float
    p99_s: float
    reduced_bytes_s: float
    paused_share: float

    @classmethod
    def of(cls, runs: Sequence[Result]) -> "Row":
        """Summarize the rounds of one mode."""
        of_rounds = ((*_quantiles(r.latencies_s), r.reduced_bytes_s, r.paused_share) for r in runs)
        return cls(runs[0].mode, *map(median, zip(*of_rounds, strict=True)))


def table(results: Sequence[Result], load: Load) -> str:
    """Markdown: a row per mode, and how ours compares with stock's."""
    rows = {mode: Row.of([r for r in results if r.mode == mode.name]) for mode in MODES}
    titles = ("", "p50 ms", "p99 ms", "x alone, p50", "p99", "DP.sync MB/s", "of ideal", "paused")
    lines = [*markdown(titles, (_cells(row, rows, load) for row in rows.values()))]
    stock, ours = rows[STOCK], rows[ANNOUNCED]
    p50, p99 = stock.p50_s / ours.p50_s, stock.p99_s / ours.p99_s
    return "\n".join([*lines, "", f"Stock over announced: p50 {p50:.1f}, p99 {p99:.1f}."])


def _cells(row: Row, rows: dict[Mode, Row], load: Load) -> list[str]:
    alone, reduces = rows[ALONE], rows[REDUCES]
    speed = f"{row.reduced_bytes_s / 1e6:.2f}"
    if row is reduces:
        return [row.mode, "", "", "", "", speed, "", ""]
    cells = [row.mode, f"{1e3 * row.p50_s:.2f}", f"{1e3 * row.p99_s:.2f}"]
    if row is alone:
        return [*cells, "1.00", "1.00", "", "", ""]
    ratios = [f"{row.p50_s / alone.p50_s:.2f}", f"{row.p99_s / alone.p99_s:.2f}"]
    reduced = row.reduced_bytes_s / (reduces.reduced_bytes_s - load.transfers_bytes_s)
    paused = f"{row.paused_share:.0%}" if row.paused_share else ""
    return [*cells, *ratios, speed, f"{reduced:.3f}", paused]


def _quantiles(latencies_s: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(latencies_s) or [0.0]
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def measure(load: Load, link: Link, logs: Path) -> Iterator[Result]:
    """Yield one round of all modes."""
    shutil.rmtree(logs, ignore_errors=True)
    with Testbed(2 * load.data_parallel, link) as testbed:
        ranks = testbed.fork(partial(run_modes, load, MODES), logs)
        codes = ranks.wait(60 + 3 * len(MODES) * load.duration_s)
    if any(code != 0 for code in codes):
        raise TestbedError(f"exit codes {codes}; see {logs}")
    lines = (logs / "rank0.log").read_text().splitlines()
    yield from (Result(**json.loads(line)) for line in lines if line.startswith("{"))


def loads(args: argparse.Namespace) -> Iterator[tuple[str, Load]]:
    """Yield a rate and a load for each table; a transfer takes a fifth of its period."""
    for rate, dp, kib in itertools.product(args.rate, args.dp, args.transfer_kib):
        if (rate_bit_s := parse_rate(rate)) is None:
            raise ValueError("--rate unshaped: nothing would share a link; give 200mbit")
        period_s = 5 * (kib << 10) * HEADERS * 8 / rate_bit_s
        load = Load(
            data_parallel=dp,
            transfer_bytes=kib << 10,
            period_s=period_s,
            announced_s=0.3 * period_s,
            duration_s=args.duration_s,
            slice_bytes=kib << 8,
        )
        yield rate, load


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    logs = Path(__file__).parents[2] / "out/preemption"
    parser.add_argument("--logs", type=Path, default=logs, help="(out/preemption)")
    parser.add_argument("--rate", nargs="+", default=["200mbit"], help="of each link (200mbit)")
    parser.add_argument("--dp", type=int, nargs="+", default=[2], help="replicas of a stage (2)")
    parser.add_argument("--transfer-kib", type=int, nargs="+", default=[256], help="(256)")
    parser.add_argument("--duration-s", type=float, default=4.0, help="of each mode (4)")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure, and print the tables."""
    args = _parse(argv)
    end_on_signals()
    try:
        check_real_time("ranks hurry")
        if extension() is None:
            raise ValueError(
                "the extension is not built, and without it nothing waits; run: make extension"
            )
        for rate, load in loads(args):
            print(
                f"\n{load.transfer_bytes >> 10} KiB every {1e3 * load.period_s:.0f} ms at {rate}, "
                f"{load.data_parallel} replicas\n"
            )
            link = Link(parse_rate(rate))
            results: list[Result] = []
            for _ in range(args.rounds):
                results += measure(load, link, args.logs)
            print(table(results, load), flush=True)
    except (TestbedError, ValueError) as error:
        return refuse("preemption.py", error)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

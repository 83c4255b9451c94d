"""Draw what the pages say in numbers: measured gains, auto's first iterations, bytes on the link.

python -m scripts.pictures gain     # of docs/results.md, from its tables
"""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from scripts.paper.curves import stored
from scripts.paper.draw import draw
from scripts.paper.results import Grid, Number, Result

ROOT = Path(__file__).parents[1]
_IN_16_BITS = "bf16, every step clips"
_CLIPPED, _UNCLIPPED = "fp32, every step clips", "fp32, no step clips"
_GRADIENTS, _PARAMETERS = "gradients, reduced", "parameters, gathered"
_AUTO = {  # docs/planning.md: what its first iterations run, and what it does meanwhile
    "stock's order": ("1 starts", "2 measured", "3 searches", "4 timed"),
    "first to try": ("5 changes", "6 timed", "7 timed"),
    "second to try": ("8 changes", "9 timed"),
    "the fastest": ("10 judged",),
}


def gain() -> Grid:
    """Gains and bounds of the jobs with replicas, by what stock's default exposes."""
    page = (ROOT / "docs/results.md").read_text()
    rows = []
    for _, gradients, link, exposed, stock, ours, _, most in _table(page, "In 16 bits"):
        name = f"{exposed}: {gradients} gradients, {link}"
        rows.append(_gain(name, _IN_16_BITS, stock, ours, most))
    for job, link, exposed, *cells in _table(page, "In fp32"):
        name = f"{exposed}: {job.removeprefix('pp=2 x ')}, {link}"
        for column, (stock, ours, _, most) in ((_CLIPPED, cells[:4]), (_UNCLIPPED, cells[4:])):
            rows.append(_gain(name, column, stock, ours, most))
    rows.sort(key=lambda number: -int(number.row.partition("%")[0]))
    return Grid(
        title="% faster than the strongest stock of the same layout",
        numbers=tuple(rows),
        drawn=(_IN_16_BITS, _CLIPPED, _UNCLIPPED),
        mark="at most, any order",
    )


def _gain(name: str, column: str, stock: str, ours: str, most: str) -> Number:
    won = round(100 * (float(stock) / float(ours) - 1), 1)
    return Number(name, column, won, float(most.partition("%")[0]))


def _table(page: str, heading: str) -> Iterator[list[str]]:
    """Yield the lines of a section's first table; where a cell is empty, that above holds."""
    found = re.search(r"(?<=:\|\n)(?:\|.*\n)+", page.partition(f"## {heading}\n")[2])
    above: list[str] = []
    for line in found[0].splitlines() if found else ():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        above = [cell or last for cell, last in zip(cells, above or cells, strict=True)]
        yield above


def auto() -> Grid:
    """The first ten iterations of a run with ``--schedule auto``, beside stock's."""
    ran, stock = (stored()[name].times_ms for name in ("auto", "megatron-best"))
    bars = {text: (text, runs) for runs, texts in _AUTO.items() for text in texts}
    return Grid(
        title=f"ms of an iteration; strongest stock, {median(stock):.0f} ms in the median",
        numbers=tuple(Number(name, "ms", ms) for name, ms in zip(bars, ran, strict=False)),
        drawn=("ms",),
        bars=bars,
    )


def delta() -> Grid:
    """Bytes that DP.sync sends for a parameter, with whole and with coded gathers."""
    log = (ROOT / "scripts/bench/LOG.md").read_text().partition("Bits of a parameter")[2]
    sent = dict(re.findall(r"^\| (\d+) \|.*\| ([\d.]+) \|$", log.partition("A training")[0], re.M))
    gathered = {"gathered whole": 2.0} | {
        f"coded, step {step}": float(bits) / 8 for step, bits in sent.items()
    }
    numbers = [
        Number(f"{kind} gradients, {how}", part, value)
        for kind, size in (("fp32", 4), ("bf16", 2))
        for how, own in gathered.items()
        for part, value in ((_GRADIENTS, size), (_PARAMETERS, own))
    ]
    return Grid(
        title="bytes that an iteration sends for each parameter",
        numbers=tuple(numbers),
        drawn=(_GRADIENTS, _PARAMETERS),
        is_stacked=True,
    )


_PICTURES = {
    "gain": ("Gain by the share that stock's default exposes", gain),
    "auto": ("First iterations with --schedule auto, small GPT", auto),
    "delta": ("Bytes of DP.sync with --delta-param-gather", delta),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m scripts.pictures")
    parser.add_argument("name", choices=_PICTURES)
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs/images", metavar="DIR")
    args = parser.parse_args(argv)
    title, grid = _PICTURES[args.name]
    result = Result(name=args.name, title=title, grids=(grid(),))
    print(*draw(result, args.pictures, measured=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())

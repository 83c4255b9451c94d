"""From the runs of a comparison to its table: medians, ratios and lower bounds."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from megatron.fold3d.commands.console import faster
from megatron.fold3d.observe.training_log import LoggedIteration, Spread
from scripts.bench.variants import DEFAULT, Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One variant, run once.

    Attributes:
        round: from 1; 0 is the run whose links are not shaped.
        warmup: how many of the first iterations are not timed.
        link_bytes: sent per timed iteration over the busiest link, in its busier direction.
        other_cpus: how many CPUs other processes kept busy, on average.
        failure: why it did not end well; empty if it did.
    """

    variant: Variant
    round: int
    iterations: tuple[LoggedIteration, ...] = ()
    warmup: int = 0
    link_bytes: float = 0.0
    other_cpus: float = 0.0
    failure: str = ""

    @property
    def times_ms(self) -> list[float]:
        """Of the timed iterations."""
        return [i.elapsed_ms for i in self.iterations if i.number > self.warmup]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One variant over all rounds. ``communication_ms`` is 0 where links are not shaped."""

    variant: Variant
    spread: Spread
    compute_ms: float
    communication_ms: float

    @property
    def bound_ms(self) -> float:
        """What no order of the same work can beat: compute or communication alone."""
        return max(self.compute_ms, self.communication_ms)


def rows(runs: Iterable[Run], rate_bit_s: float | None) -> list[Row]:
    """Summarise each variant that ran well with shaped and with unshaped links."""
    by_variant: dict[Variant, list[Run]] = {}
    for run in runs:
        if not run.failure:
            by_variant.setdefault(run.variant, []).append(run)
    found = []
    for variant, its_runs in by_variant.items():
        alone = [ms for run in its_runs if run.round == 0 for ms in run.times_ms]
        shaped = [run for run in its_runs if run.round > 0]
        times_ms = [ms for run in shaped for ms in run.times_ms]
        if not alone or not times_ms:
            continue
        link_bytes = median(run.link_bytes for run in shaped)
        found.append(
            Row(
                variant=variant,
                spread=Spread.of(times_ms),
                compute_ms=median(alone),
                communication_ms=link_bytes * 8e3 / rate_bit_s if rate_bit_s else 0.0,
            )
        )
    return found


def strongest_stock(found: Iterable[Row]) -> Row | None:
    """Return the fastest of Megatron's own schedules, its default included."""
    stock = [row for row in found if row.variant.is_stock]
    return min(stock, key=lambda row: row.spread.median_ms, default=None)


def default_stock(found: Iterable[Row]) -> Row | None:
    """Return Megatron's default schedule."""
    return next((row for row in found if row.variant == DEFAULT), None)


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, each as soon as its row is known; numbers are to the right."""
    yield f"| {' | '.join(titles)} |"
    yield "|---" + "|--:" * (len(titles) - 1) + "|"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def table(found: Sequence[Row]) -> str:
    """Spell the rows as Markdown, with how much faster than stock a variant is."""
    default, strongest = default_stock(found), strongest_stock(found)
    titles = ["variant", "iteration ms (quartiles)", "to stock, same layout", "to its default"]
    titles += ["compute ms", "link ms", "of the bound"]
    cells = (
        (
            f"**{row.variant.name}**" if row is strongest else row.variant.name,
            str(row.spread),
            _gain(strongest, row),
            _gain(default, row),
            f"{row.compute_ms:.0f}",
            f"{row.communication_ms:.0f}" if row.communication_ms else "-",
            f"{row.spread.median_ms / row.bound_ms:.2f}",
        )
        for row in found
    )
    return "\n".join(markdown(titles, cells))


def _gain(other: Row | None, row: Row) -> str:
    return faster(other.spread.median_ms / row.spread.median_ms - 1) if other else "-"


def _difference(loss: float | None, expected: float | None) -> float:
    """Relative to what was expected; infinite unless both are numbers or both are missing."""
    if loss is None or expected is None:
        return 0.0 if loss is expected else math.inf
    difference = abs(loss - expected) / abs(expected)
    return math.inf if math.isnan(difference) else difference


def loss_disagreements(runs: Sequence[Run], tolerance: float) -> tuple[float, list[str]]:
    """Compare every run's losses with those of the first run, iteration by iteration.

    Returns:
        The largest relative difference, and a line for each run that is beyond the tolerance.
    """
    well = [run for run in runs if not run.failure]
    if not well:
        return 0.0, []
    expected = {iteration.number: iteration.loss for iteration in well[0].iterations}
    largest, lines = 0.0, []
    for run in well[1:]:
        off = max((_difference(i.loss, expected.get(i.number)) for i in run.iterations), default=0)
        largest = max(largest, off)
        if off > tolerance:
            lines.append(f"{run.variant.name}, round {run.round}: losses differ by {off:.1e}")
    return largest, lines

"""Cells of the grid in which ranks wait for DP.sync, and their tables.

Round 1 sweeps stock's configurations, and the fastest goes on beside ours. Round 0 is without
shaped links: it is the same for all rates of a job.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from scripts.bench import bounds, compare, predict, summary, variants
from scripts.bench.cells import Cell
from scripts.bench.predict import Simulation
from scripts.bench.summary import Run, markdown
from scripts.bench.testbed import OFFLOAD_BYTES, Link, parse_rate
from scripts.bench.variants import DEFAULT, Job, Variant, with_parts

_UNCLIPPED = ("--clip-grad", "0")
_NEVER_CLIPS = ("--clip-grad", "1000")  # above every bound here
_FORWARD_MS, _BACKWARD_MS = 12, 24  # of a layer: four ranks on two cores keep this pace
_QUEUE_BYTES = 8 * OFFLOAD_BYTES  # of a link: where it is shorter, messages beside DP.sync get lost
_WARM_UP = 3  # iterations that are not timed
# The same for flags that are `auto`. Shares hold from the 6th, and what --schedule auto chose from
# the 10th, each after up to five more in which the search runs beside the ranks.
_MEASURES_ITSELF = {"-auto-": 12, "chosen-": 15}
Found = Sequence[tuple["SyncCell", Sequence[Run]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncCell(Cell):
    """The job of the other benches at one link rate, with clipping as most people have it."""

    rate: str
    hidden_size: int = 256
    num_layers: int = 16
    precision: str = "fp32"
    first_round: ClassVar[int] = 0

    @property
    def name(self) -> str:
        """As the table has it."""
        layers = "" if self.num_layers == 16 else f", {self.num_layers} layers"
        precision = "" if self.precision == "fp32" else f", {self.precision}"
        return f"{self.sizes}{layers}{precision}, {self.rate}"

    @property
    def layer_ms(self) -> tuple[float, float]:
        """What a layer's forward and backward are paced to."""
        return _FORWARD_MS * self.slow_down, _BACKWARD_MS * self.slow_down

    @property
    def link(self) -> Link:
        """Of each host, with room for the same bytes at every rate."""
        if (rate_bit_s := parse_rate(self.rate)) is None:
            return Link()
        rate_bit_s /= self.slow_down
        return Link(rate_bit_s, queue_ms=_QUEUE_BYTES * 8e3 / rate_bit_s)

    @property
    def job(self) -> Job:
        """What is trained."""
        return Job(
            num_ranks=self.num_ranks,
            data_parallel=self.data_parallel,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            recompute=self.recompute,
            precision=self.precision,
        )

    def chosen(self, number: int, runs: Sequence[Run]) -> list[Variant]:
        """Return stock's default, candidates for its strongest, and ours."""
        by_name = {variant.name: variant for variant in variants.known(self.job)}
        find = self._clipped_and_not if self.precision == "fp32" else self._in_16_bits
        found = [DEFAULT, *find(by_name, self.job.segment_counts[-1])]
        return found if number < 2 else compare.kept(found, runs, 1)

    def _clipped_and_not(self, by_name: Mapping[str, Variant], most: int) -> Iterator[Variant]:
        yield from (by_name[f"stock-v{most}-n8{ending}"] for ending in ("-do", ""))
        order, distributed = (by_name[f"aiao-s{most}{ending}"] for ending in ("", "-do"))
        yield distributed
        if self.data_parallel == 1 or self.recompute:  # forwards are too short for an all-gather
            yield order
        if self.data_parallel > 1:
            split = with_parts(order.flags, ":step=next")
            delays = with_parts(split, f":wgrad=last@{most // 2 - 1},{most // 2}")
            yield Variant(f"{order.name}-auto-bound", (*split, *_NEVER_CLIPS))
            yield Variant(f"{order.name}-auto-delay", (*delays, *_NEVER_CLIPS))
            for run, ending in ((order, ""), (distributed, "-do")):
                chooses = _chooses(f"chosen-s{most}{ending}", run)
                yield chooses
                yield Variant(f"{chooses.name}-auto-unclipped", (*chooses.flags, *_UNCLIPPED))

    def _in_16_bits(self, by_name: Mapping[str, Variant], most: int) -> Iterator[Variant]:
        """Yield more of stock's flags, as what travels depends on them, and ours that clips."""
        names = (f"v{most}-n8-do", f"v{most}-n8", f"v{most // 2}-n8-do")
        distributed, *others = (by_name[f"stock-{name}"] for name in names)
        yield from (distributed, *others, by_name[f"stock-v{most // 2}-n8-noalign-do"])
        if self.data_parallel == 4:
            instances = ("--num-distributed-optimizer-instances", "2")
            yield Variant(f"{distributed.name}-instances", (*distributed.flags, *instances))
        yield _chooses(f"chosen-s{most}-do", by_name[f"aiao-s{most}-do"])

    def warmup(self, variant: Variant) -> int:
        """Return how many iterations of a variant are not timed."""
        found = (count for part, count in _MEASURES_ITSELF.items() if part in variant.name)
        return max(found, default=_WARM_UP)

    def key(self, variant: Variant, number: int) -> str:
        """Return the name under which a run is kept."""
        return Cell.key(self if number else replace(self, rate="unshaped"), variant, number)

    @property
    def simulation(self) -> Simulation:
        """What the simulator knows of it."""
        return Simulation.of(self.job, self.layer_ms, self.link)


def _chooses(name: str, run: Variant) -> Variant:
    group = ("--microbatch-group-size-per-virtual-pipeline-stage", "8")
    return Variant(name, ("--schedule", "auto", *run.flags[2:], *group))


# Rates at which stock's default leaves DP.sync exposed for about 45, 30 and 15% of an iteration; at
# 100 Mb/s compute and DP.sync take about as long as each other.
# Eight ranks have smaller layers: two cores cannot compute the others in the paced time.
CELLS = tuple(
    SyncCell(num_ranks=pp, data_parallel=dp, rate=rate, **what)
    for pp, dp, rates, what in (
        (2, 2, ("90mbit", "100mbit", "125mbit", "175mbit", "350mbit"), {}),
        (2, 2, ("70mbit", "135mbit", "325mbit"), {"recompute": True}),
        (2, 4, ("37mbit", "62mbit", "150mbit"), {"hidden_size": 128}),
        (4, 1, ("90mbit",), {}),
        (2, 4, ("48mbit",), {"hidden_size": 128, "recompute": True}),
        (2, 3, ("67.5mbit",), {"num_layers": 12}),
        (2, 2, ("75mbit", "130mbit", "260mbit"), {"precision": "bf16"}),
        (2, 2, ("25mbit", "50mbit", "87mbit", "175mbit"), {"precision": "bf16-grads"}),
        (2, 3, ("34mbit",), {"num_layers": 12, "precision": "bf16-grads"}),
        (2, 4, ("28mbit",), {"hidden_size": 128, "precision": "bf16"}),
        (2, 4, ("18.5mbit",), {"hidden_size": 128, "precision": "bf16-grads"}),
    )
    for rate in rates
)


def table(found: Found) -> str:
    """Spell each cell as Markdown, below the share of the default that its link costs."""
    parts = []
    for cell, runs in found:
        rows = summary.rows(runs, cell.link.rate_bit_s)
        if default := summary.default_stock(rows):
            exposed = 1 - default.compute_ms / default.spread.median_ms
            title = f"{cell.name}, {exposed:.0%} of stock's default exposed"
            parts.append(f"{title}\n\n{summary.table(rows)}")
    return "\n\n".join(parts)


def predictions(found: Found) -> str:
    """Spell what `scripts.bench.predict` says of the cells, beside what was measured there."""
    every: list[predict.Row] = []
    for cell, runs in found:
        if measured := summary.rows(runs, None):
            rows = predict.rows(cell.simulation, measured)
            every += (replace(row, name=f"{cell.rate}, {row.name}") for row in rows)
    return predict.table(every)


def bounds_table(found: Found) -> str:
    """Spell how much faster than the strongest stock any order can be, and how much ours is."""
    lines = (
        [cell.name, *cells]
        for cell, runs in found
        if (cells := bounds.cells(cell.simulation, cell.job.segment_counts, runs))
    )
    return "\n".join(markdown(bounds.TITLES, lines))

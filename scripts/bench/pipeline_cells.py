"""Cells of the grid in which ranks wait for transfers and in the bubble, not for DP.sync.

Round 1 sweeps stock's configurations: 1F1B, and two and four segments with groups of every size.
The fastest goes on, and ours runs in the same layout beside it. Messages are as large as a link's
buffers are not: what a sender waits for is the wire.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median

from megatron.fold3d.observe.training_log import Spread
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.lower_bound import Bounds
from scripts.bench import variants
from scripts.bench.summary import Run
from scripts.bench.variants import DEFAULT, Job, Variant

_LAYERS_OF_A_RANK, _SEGMENTS = 4, (2, 4)
_MESSAGE_BYTES = 4 * 16 * 64 * 64  # fp32, 16 sequences of 64 tokens, hidden size 64
_FORWARD_MS, _BACKWARD_MS = 9, 18  # of a layer: four ranks on two cores keep this pace

_OVERLAPS = ("--overlap-grad-reduce",)
AHEAD = Variant("1f1b-ahead", ("--schedule", "1f1b:ahead=auto", *_OVERLAPS))
PLACED = Variant("1f1b-placed", ("--schedule", "1f1b:ahead=auto:wgrad=gaps", *_OVERLAPS))


def slower_than(slow_down: float) -> str:
    """Return what the name of a cell begins with; runs that are kept go by it."""
    return "" if slow_down == 1 else f"{slow_down:g} times slower: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A job and its links. ``transfer`` is what a message takes of a stage's computation."""

    num_ranks: int
    data_parallel: int
    num_microbatches: int
    transfer: float
    recompute: bool
    slow_down: float = 1.0

    @property
    def name(self) -> str:
        """As the table has it."""
        recompute = ", recompute" if self.recompute else ""
        sizes = f"pp={self.num_ranks} x dp={self.data_parallel}{recompute}"
        slower = slower_than(self.slow_down)
        return f"{slower}{sizes}, m={self.num_microbatches}, {self.transfer:.0%}"

    @property
    def layer_ms(self) -> tuple[float, float]:
        """What a layer's forward and backward are paced to: more ranks share the same cores."""
        slower = self.num_ranks * self.data_parallel / 4 * self.slow_down
        return _FORWARD_MS * slower, _BACKWARD_MS * slower

    @property
    def stage_ms(self) -> float:
        """A stage's computation on one micro-batch; a recomputed forward is a part of it."""
        forward_ms, backward_ms = self.layer_ms
        return _LAYERS_OF_A_RANK * (forward_ms * (1 + self.recompute) + backward_ms)

    @property
    def rate_bit_s(self) -> float:
        """Rate of the links."""
        return _MESSAGE_BYTES * 8 / (self.transfer * self.stage_ms * 1e-3)

    @property
    def costs(self) -> Costs:
        """Of one segment, at these paces, whatever the CPUs do."""
        forward_s, backward_s = (_LAYERS_OF_A_RANK * ms * 1e-3 for ms in self.layer_ms)
        costs = Costs.uniform(
            self.num_ranks,
            forward_s=forward_s,
            backward_s=backward_s + forward_s * self.recompute,
            p2p_s=self.transfer * self.stage_ms * 1e-3,
        )
        return replace(costs, weight_s=(forward_s,) * self.num_ranks)

    @property
    def bound_ms(self) -> float:
        """What no order beats with one segment."""
        order = build(
            "1f1b",
            num_ranks=self.num_ranks,
            num_segments=1,
            num_microbatches=self.num_microbatches,
        )
        return Bounds(order, self.costs).order_s * 1e3

    def job(self, num_iterations: int = 0) -> Job:
        """Return the job: many tokens through narrow layers, for large messages."""
        return Job(
            num_ranks=self.num_ranks,
            data_parallel=self.data_parallel,
            num_microbatches=self.num_microbatches,
            num_layers=_LAYERS_OF_A_RANK * self.num_ranks,
            hidden_size=64,
            seq_length=64,
            micro_batch_size=16,
            num_iterations=num_iterations,
            clip_grad=1.0,
            recompute=self.recompute,
        )


CELLS = tuple(
    Cell(
        num_ranks=num_ranks,
        data_parallel=data_parallel,
        num_microbatches=rounds * num_ranks,
        transfer=transfer,
        recompute=recompute,
    )
    for num_ranks, data_parallel, recompute, rounds, transfer in product(
        (4, 8), (1, 2), (False, True), (1, 2, 4), (0.2, 0.4, 0.8)
    )
)


def swept(cell: Cell) -> list[Variant]:
    """Return stock's configurations, its default first."""
    names = {
        f"stock-v{segments}-n{group}" for segments in _SEGMENTS for group in cell.job().group_sizes
    }
    if cell.data_parallel > 1:
        names.add("stock-1f1b-overlap")
    return [DEFAULT, *(v for v in variants.known(cell.job()) if v.name in names)]


def same_layout(stock: Variant) -> Variant:
    """Return ours in the layout of one of stock's: its segments, and its groups."""
    if "--num-virtual-stages-per-pipeline-rank" not in stock.flags:
        return Variant("1f1b", ("--schedule", "1f1b", *_OVERLAPS))
    return Variant(
        stock.name.replace("stock", "interleaved"), ("--schedule", "interleaved", *stock.flags)
    )


def strongest(runs: Sequence[Run]) -> Variant:
    """Return stock's fastest in the first round; its default if none ended well."""
    first = [run for run in runs if run.round == 1 and run.variant.is_stock and not run.failure]
    first.sort(key=lambda run: median(run.times_ms))
    return first[0].variant if first else DEFAULT


def chosen(cell: Cell, number: int, runs: Sequence[Run]) -> list[Variant]:
    """Return what runs in a round, counted from 1, by what has run before."""
    if number == 1:
        return [*swept(cell), AHEAD, PLACED]
    best = strongest(runs)
    return [*dict.fromkeys((DEFAULT, best)), same_layout(best), AHEAD, PLACED]


def table(found: Sequence[tuple[Cell, Sequence[Run]]]) -> str:
    """Spell cells as Markdown, a line each; times are medians in ms."""
    titles = ["cell", "stock default", "strongest stock", "ours, same layout", "forwards ahead"]
    titles += ["and weight gradients", "bound", "x default", "x strongest", "same layout x stock"]
    titles += ["of the bound"]
    lines = [f"| {' | '.join(titles)} |", "|---" + "|--:" * (len(titles) - 1) + "|"]
    for cell, runs in found:
        if cells := _cells(cell, runs):
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(cell: Cell, runs: Sequence[Run]) -> list[str]:
    best = strongest(runs)
    alike = same_layout(best)
    default, fastest, same, ahead, placed = (
        _median_ms(runs, variant) for variant in (DEFAULT, best, alike, AHEAD, PLACED)
    )
    if default is None or fastest is None:
        return []
    ours = min((ms for ms in (same, ahead, placed) if ms is not None), default=None)
    return [
        cell.name,
        f"{default:.0f}",
        f"{fastest:.0f} ({best.name.removeprefix('stock-')})",
        *("-" if ms is None else f"{ms:.0f}" for ms in (same, ahead, placed)),
        f"{cell.bound_ms:.0f}",
        *(_ratio(*pair) for pair in ((default, ours), (fastest, ours), (fastest, same))),
        _ratio(ours, cell.bound_ms),
    ]


def _median_ms(runs: Sequence[Run], variant: Variant) -> float | None:
    times_ms = [
        ms for run in runs if run.variant == variant and not run.failure for ms in run.times_ms
    ]
    return Spread.of(times_ms).median_ms if times_ms else None


def _ratio(of: float | None, to: float | None) -> str:
    return "-" if of is None or to is None else f"{of / to:.2f}"

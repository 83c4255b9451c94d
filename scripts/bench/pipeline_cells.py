"""Cells of the grid in which ranks wait for transfers and in the bubble, not for DP.sync.

Round 1 sweeps stock's configurations: 1F1B, and two and four segments with groups of every size.
The fastest goes on beside ours, which has one segment. Messages are as large as a link's
buffers are not: what a sender waits for is the wire.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import ClassVar

from megatron.fold3d.commands.console import faster
from megatron.fold3d.observe.training_log import Spread
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.lower_bound import Bounds
from scripts.bench import variants
from scripts.bench.cells import Cell
from scripts.bench.summary import Run, markdown
from scripts.bench.testbed import Link
from scripts.bench.variants import DEFAULT, Job, Variant

_LAYERS_OF_A_RANK, _SEGMENTS = 4, (2, 4)
_MESSAGE_BYTES = 4 * 16 * 64 * 64  # fp32, 16 sequences of 64 tokens, hidden size 64
_FORWARD_MS, _BACKWARD_MS = 9, 18  # of a layer: four ranks on two cores keep this pace
_CHOOSES_ITS_ORDER = 9  # iterations until what `auto` and `gaps` measure holds

_OVERLAPS = ("--overlap-grad-reduce",)
GAPS = Variant("1f1b-gaps", ("--schedule", "1f1b:wgrad=gaps", *_OVERLAPS))
"""No rank holds more than the first of stock's 1F1B."""
AHEAD = Variant("1f1b-ahead", ("--schedule", "1f1b:ahead=auto", *_OVERLAPS))
PLACED = Variant("1f1b-placed", ("--schedule", "1f1b:ahead=auto:wgrad=gaps", *_OVERLAPS))
_OURS = (GAPS, AHEAD, PLACED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCell(Cell):
    """A job and its links. ``transfer`` is what a message takes of a stage's computation."""

    num_microbatches: int
    transfer: float
    first_round: ClassVar[int] = 1

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.sizes}, m={self.num_microbatches}, {self.transfer:.0%}"

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
    def link(self) -> Link:
        """Of each host; a message may wait for another."""
        transfer_ms = self.transfer * self.stage_ms
        return Link(_MESSAGE_BYTES * 8e3 / transfer_ms, queue_ms=transfer_ms)

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
            "1f1b", num_ranks=self.num_ranks, num_segments=1, num_microbatches=self.num_microbatches
        )
        return Bounds(order, self.costs).order_s * 1e3

    @property
    def job(self) -> Job:
        """What is trained: many tokens through narrow layers, for large messages."""
        return Job(
            num_ranks=self.num_ranks,
            data_parallel=self.data_parallel,
            num_microbatches=self.num_microbatches,
            num_layers=_LAYERS_OF_A_RANK * self.num_ranks,
            hidden_size=64,
            seq_length=64,
            micro_batch_size=16,
            recompute=self.recompute,
        )

    def swept(self) -> list[Variant]:
        """Return stock's configurations, its default first."""
        groups = self.job.group_sizes
        names = {f"stock-v{segments}-n{group}" for segments in _SEGMENTS for group in groups}
        if self.data_parallel > 1:
            names.add("stock-1f1b-overlap")
        return [DEFAULT, *(v for v in variants.known(self.job) if v.name in names)]

    def chosen(self, number: int, runs: Sequence[Run]) -> list[Variant]:
        """Return what runs in a round, counted from 1, by what has run before."""
        if number == 1:
            return [*self.swept(), *_OURS]
        return [*dict.fromkeys((DEFAULT, strongest(runs))), *_OURS]

    def warmup(self, variant: Variant) -> int:
        """Return how many iterations of a variant are not timed."""
        return 2 if variant.is_stock else _CHOOSES_ITS_ORDER


CELLS = tuple(
    PipelineCell(
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


def strongest(runs: Sequence[Run]) -> Variant:
    """Return stock's fastest in the first round; its default if none ended well."""
    first = [run for run in runs if run.round == 1 and run.variant.is_stock and not run.failure]
    first.sort(key=lambda run: median(run.times_ms))
    return first[0].variant if first else DEFAULT


def table(found: Sequence[tuple[PipelineCell, Sequence[Run]]]) -> str:
    """Spell cells as Markdown, a line each; times are medians in ms."""
    titles = ["cell", "stock default", "stock, same layout"]
    titles += ["weight gradients in gaps", "forwards ahead", "both"]
    titles += ["bound", "to stock, same layout", "to its default", "of the bound"]
    return "\n".join(markdown(titles, filter(None, (_cells(*each) for each in found))))


def _cells(cell: PipelineCell, runs: Sequence[Run]) -> list[str]:
    best = strongest(runs)
    default, fastest, *each = (_median_ms(runs, variant) for variant in (DEFAULT, best, *_OURS))
    if default is None or fastest is None:
        return []
    ours = min((ms for ms in each if ms is not None), default=None)
    return [
        cell.name,
        f"{default:.0f}",
        f"{fastest:.0f} ({best.name.removeprefix('stock-')})",
        *("-" if ms is None else f"{ms:.0f}" for ms in each),
        f"{cell.bound_ms:.0f}",
        *("-" if ours is None else faster(ms / ours - 1) for ms in (fastest, default)),
        "-" if ours is None else f"{ours / cell.bound_ms:.2f}",
    ]


def _median_ms(runs: Sequence[Run], variant: Variant) -> float | None:
    times_ms = [
        ms for run in runs if run.variant == variant and not run.failure for ms in run.times_ms
    ]
    return Spread.of(times_ms).median_ms if times_ms else None

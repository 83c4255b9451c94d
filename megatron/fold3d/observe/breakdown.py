"""A row of the paper's Table II for a timeline: the time of an iteration, memory and FLOP/s."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from megatron.fold3d.observe.digits import digits, milliseconds, seconds
from megatron.fold3d.observe.exposure import Exposure, exposure, mean
from megatron.fold3d.observe.timeline import Lane, Timeline, covered_s
from megatron.fold3d.observe.trace_files import RankTrace

COLUMNS = {
    "forward_s": "forward",
    "backward_s": "backward",
    "optimizer_s": "optimizer",
    "bubble_s": "bubble",
    "grad_sync_s": "DP.sync",
    "p2p_s": "PP.sync",
    "copy_s": "copies",
}
"""The fields of `Exposure` and their titles."""
_NOT_IN_THE_PAPER = ("optimizer_s", "copy_s")


class Flops(NamedTuple):
    """FLOPs, or FLOP/s, as Megatron and as the paper count them."""

    model: float
    hardware: float
    """With what backwards compute again."""

    def times(self, factor: float) -> "Flops":
        """Return as many times of both."""
        return Flops(factor * self.model, factor * self.hardware)

    def __str__(self) -> str:
        model, hardware = digits(self.model / 1e12), digits(self.hardware / 1e12)
        return f"{model} TFLOP/s of the model, {hardware} with recomputation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """One row: seconds of an iteration as means over ranks, and other known quantities.

    Attributes:
        of_rank: each rank's own seconds.
        device_bytes: the most that any GPU held; None where there is none.
        host_bytes: the most that any process held.
        flops: FLOP/s of a GPU; None where they are not known.
        utilisation: the model's share of the GPU's peak FLOP/s.
        offloaded_bytes: the most that any process copied to the host in an iteration; None without
            offload.
        tp_sync_s: seconds of an iteration in which tensor-parallel collectives are under way, the
            mean over ranks; they are inside computations. None where they were not recorded.
        ep_sync_s: likewise of the all-to-alls of experts.
        deferred_share: the mean share of the gradients that was reduced during the next
            iteration's forward; None where nothing is deferred.
    """

    of_rank: tuple[Exposure, ...]
    device_bytes: float | None = None
    host_bytes: float | None = None
    flops: Flops | None = None
    utilisation: float | None = None
    offloaded_bytes: float | None = None
    deferred_share: float | None = None
    tp_sync_s: float | None = None
    ep_sync_s: float | None = None

    @property
    def iteration(self) -> Exposure:
        """Seconds, the mean over all ranks."""
        return mean(self.of_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One run on a page or a picture, such as the measured one, and its row of Table II."""

    name: str
    timeline: Timeline
    row: Breakdown
    is_predicted: bool = False

    def ms(self, time_s: float) -> str:
        """Return milliseconds with the digits that are known."""
        return digits(1e3 * time_s) if self.is_predicted else milliseconds(time_s)

    def time(self, time_s: float) -> str:
        """Return a time with its unit and the digits that are known."""
        return seconds(time_s) if self.is_predicted else f"{milliseconds(time_s)} ms"


def measured(ranks: Sequence[RankTrace], timeline: Timeline) -> Breakdown:
    """Return the row of a traced pipeline; bytes are the maximum over all ``ranks`` of the run."""
    iterations = [iteration for rank in ranks for iteration in rank.iterations]
    device = [i.gpu_memory_bytes for i in iterations if i.gpu_memory_bytes is not None]

    def counted(name: str) -> list[float]:
        return [iteration.counts[name] for iteration in iterations if name in iteration.counts]

    shares, of_rank = counted("deferred_grad_sync_share"), exposure_of_ranks(timeline)
    # Tensor-parallel ranks of a replica share one micro-batch.
    replicas = 1 + max(rank.dp_rank for rank in ranks)
    per_gpu_s = ranks[0].num_microbatches * replicas / len(ranks) / mean(of_rank).total_s
    model = ranks[0].microbatch_flops if device else 0.0
    flops = Flops(model, model + ranks[0].recomputed_flops).times(per_gpu_s)
    return Breakdown(
        of_rank=of_rank,
        device_bytes=max(device, default=None),
        host_bytes=max(iteration.host_memory_bytes for iteration in iterations),
        flops=flops if model else None,
        offloaded_bytes=max(counted("offloaded_bytes"), default=None),
        deferred_share=fmean(shares) if shares else None,
        tp_sync_s=layer_sync_s(timeline, Lane.TP_SYNC),
        ep_sync_s=layer_sync_s(timeline, Lane.EP_SYNC),
    )


def exposure_of_ranks(timeline: Timeline) -> tuple[Exposure, ...]:
    """Return, for each rank, where its time went: the mean of all iterations but the first.

    An iteration counts from the end of the previous one. A run of one iteration counts that one.
    """
    count = min(len(timeline.iteration_ends_s(rank)) for rank in range(timeline.num_ranks))
    rows = [exposure(timeline, iteration) for iteration in range(min(1, count - 1), count)]
    return tuple(map(mean, zip(*rows, strict=True)))


def layer_sync_s(timeline: Timeline, lane: Lane) -> float | None:
    """Return the seconds of one of `LAYER_SYNCS` in an iteration; None if it has no spans.

    This is the mean over ranks and iterations. Collectives that overlap each other count once.
    """
    spans = [timeline.lane(rank, lane) for rank in range(timeline.num_ranks)]
    if not any(spans):
        return None
    iterations = len(timeline.iteration_ends_s(0))
    return sum(map(covered_s, spans)) / (timeline.num_ranks * iterations)


def table_ii(*rows: Exposure) -> tuple[list[str], list[list[float]]]:
    """Return the titles of the paper's Table II, and below them the seconds of each row.

    The last column is the whole iteration. There are also columns that the paper lacks, if they are
    not zero in all rows.
    """
    shown = [
        name
        for name in COLUMNS
        if name not in _NOT_IN_THE_PAPER or any(getattr(row, name) for row in rows)
    ]
    titles = [*(COLUMNS[name] for name in shown), "iteration"]
    return titles, [[*(getattr(row, name) for name in shown), row.total_s] for row in rows]

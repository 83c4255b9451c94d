"""The result of a search."""

from dataclasses import dataclass

from megatron.fold3d.observe.exposure import Exposure
from megatron.fold3d.predict.search.candidates import Candidate

WORTHWHILE = 0.01  # a smaller gain is within the error of the costs


@dataclass(frozen=True, slots=True)
class JudgedCandidate:
    """A configuration with its predicted time and memory."""

    candidate: Candidate
    iteration_s: float
    device_bytes: float
    exposed: Exposure
    host_bytes: float = 0.0
    """Of one GPU's activations."""

    @property
    def limit(self) -> str:
        """The name of what takes the most time beside computation."""
        row = self.exposed
        causes = {
            "bubble": row.bubble_s,
            "DP.sync": row.grad_sync_s,
            "PP.sync": row.p2p_s,
            "host copies": row.copy_s,
        }
        name = max(causes, key=causes.__getitem__)
        share = row.share(causes[name])
        return f"{name} {share:.0%}" if share >= 0.02 else "computation"


@dataclass(frozen=True, slots=True)
class Search:
    """The best configurations, fastest first, and how many were looked at."""

    best: tuple[JudgedCandidate, ...]
    best_stock: JudgedCandidate | None
    considered: int
    too_large: int
    same_layout: JudgedCandidate | None = None
    """The best of stock in the layout of the best of ours, if any fits."""

    tried: tuple[JudgedCandidate, ...] = ()
    """All that were simulated."""
    in_16_bits: tuple[JudgedCandidate, ...] = ()
    """The best of ours and of stock whose gradients travel in 16 bits, if the others' do not."""

    coded: tuple[JudgedCandidate, ...] = ()
    """The best of our orders and of stock's whose all-gathers are coded, if that is faster."""

    many_queues_s: tuple[float, float] | None = None
    """What the choice takes with 32 hardware queues, if it was simulated with one: at least, and if
    TP.sync is exposed that one queue may hide."""

    @property
    def uncoded(self) -> JudgedCandidate | None:
        """The best of our schedules that gathers whole parameters, if there is any."""
        return next((c for c in self.best if not c.candidate.is_stock), None)

    @property
    def ours(self) -> JudgedCandidate | None:
        """The best that Megatron cannot run without us; the plainest if others gain too little."""
        plainest_first = [c for c in (self.uncoded, *reversed(self.coded)) if c is not None]
        best_s = min((c.iteration_s for c in plainest_first), default=0.0)
        near = (c for c in plainest_first if c.iteration_s < (1 + WORTHWHILE) * best_s)
        return next(near, None)

    @property
    def gain(self) -> float:
        """By how much the best of ours is faster than the best of stock."""
        if self.best_stock is None or self.ours is None:
            return 0.0
        return self.best_stock.iteration_s / self.ours.iteration_s - 1

    @property
    def choice(self) -> JudgedCandidate:
        """The one to take: stock's unless ours is worthwhile."""
        if self.best_stock is None or (self.ours is not None and self.gain >= WORTHWHILE):
            return self.ours or self.best[0]
        return self.best_stock

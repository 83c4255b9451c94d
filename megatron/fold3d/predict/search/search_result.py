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
    """Bytes of one GPU's activations in host memory."""

    @property
    def limit(self) -> str:
        """The largest exposed part of the iteration and its share: "DP.sync 12%"."""
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
    """The best configurations, fastest first, and how many were considered or too large."""

    best: tuple[JudgedCandidate, ...]
    best_stock: JudgedCandidate | None
    considered: int
    too_large: int
    same_layout: JudgedCandidate | None = None
    """Stock's fastest candidate in the layout of our fastest candidate, if any fits."""

    tried: tuple[JudgedCandidate, ...] = ()
    """All simulated candidates."""
    in_16_bits: tuple[JudgedCandidate, ...] = ()
    """The fastest of ours and of stock with gradients summed in 16 bits, if faster than in 32."""

    coded: tuple[JudgedCandidate, ...] = ()
    """The fastest in our orders and in stock's with coded all-gathers, if faster than without."""

    many_queues_s: tuple[float, float] | None = None
    """Bounds on the choice's seconds with 32 hardware queues, if it was simulated with one queue:
    see `many_queues_s`."""

    @property
    def uncoded(self) -> JudgedCandidate | None:
        """Our fastest schedule that gathers whole parameters, if there is any."""
        return next((c for c in self.best if not c.candidate.is_stock), None)

    @property
    def ours(self) -> JudgedCandidate | None:
        """The fastest that Megatron cannot run without us; a plainer one if nearly as fast."""
        plainest_first = [c for c in (self.uncoded, *reversed(self.coded)) if c is not None]
        best_s = min((c.iteration_s for c in plainest_first), default=0.0)
        near = (c for c in plainest_first if c.iteration_s < (1 + WORTHWHILE) * best_s)
        return next(near, None)

    @property
    def gain(self) -> float:
        """By which part our fastest candidate is faster than stock's: 0.1 is 10% faster."""
        if self.best_stock is None or self.ours is None:
            return 0.0
        return self.best_stock.iteration_s / self.ours.iteration_s - 1

    @property
    def choice(self) -> JudgedCandidate:
        """The recommended candidate: stock's, unless ours gains at least `WORTHWHILE`."""
        if self.best_stock is None or (self.ours is not None and self.gain >= WORTHWHILE):
            return self.ours or self.best[0]
        return self.best_stock

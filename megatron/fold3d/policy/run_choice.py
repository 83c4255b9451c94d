"""The choices of ``--schedule auto``: ways to run one model that compute the same sums.

Model chunks, optimizer and gradient buckets are made before training, so all choices share them.
Choices differ in when something is computed, sent or stepped.
"""

from dataclasses import dataclass

from megatron.fold3d.plan.ir import Plan, stages_of
from megatron.fold3d.policy.replicated_segments import Segments

LEAST_GAIN = 0.002  # relative to stock's iteration: a smaller predicted gain is not tried


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChoice:
    """One way to run the iterations of some number of micro-batches.

    Attributes:
        name: the name of the order, as flags.
        order: the order of computation, with the weight gradients that it places.
        shares: by stage, the share of DP.sync behind the backwards, if the rest reaches into the
            next iteration; None ends DP.sync with the iteration.
        delayed: segments whose weight gradients are apart from their backwards.
        early: of these, the ones whose DP.sync starts between their weight gradients although it
            may reach into the next iteration, or reduces to shards.
        replicated: segments that every replica steps in full.
    """

    name: str
    order: Plan
    shares: tuple[float, ...] | None = None
    delayed: Segments = ()
    early: Segments = ()
    replicated: Segments = ()

    @property
    def defers(self) -> bool:
        """Whether DP.sync may reach into the next iteration."""
        return self.shares is not None

    @property
    def cuts_sums(self) -> bool:
        """Whether gradients are reduced in other slices, or by other collectives, than stock's."""
        return self.defers or bool(self.replicated)

    @property
    def replicated_stages(self) -> tuple[int, ...]:
        """The stages of the segments that every replica steps in full."""
        return stages_of(self.replicated, self.order.num_ranks)

    @property
    def reduced_early(self) -> tuple[int, ...]:
        """The stages of the segments of ``early``."""
        return stages_of(self.early, self.order.num_ranks)

    def __str__(self) -> str:
        """Return the flags that ask for the same."""
        parts = [self.name]
        if self.defers:
            parts.append("--backward-share auto")
        for flag, some in (
            ("--delay-weight-grads", self.delayed),
            ("--early-dp-sync", self.early),
            ("--replicate-optimizer", self.replicated),
        ):
            if some:
                parts.append(f"{flag} {','.join(map(str, some))}")
        return " ".join(parts)


def stock_schedule(num_segments: int) -> str:
    """Return the name of stock Megatron's schedule for this number of model chunks."""
    return "interleaved" if num_segments > 1 else "1f1b"

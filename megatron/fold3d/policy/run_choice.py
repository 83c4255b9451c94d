"""The choices of ``--schedule auto``: ways to run one model that compute the same sums.

Model chunks, optimizer and gradient buckets are made before training, so all choices share them.
Choices differ in when something is computed, sent or stepped.
"""

from dataclasses import dataclass

from megatron.fold3d.plan.ir import Plan, stages_of
from megatron.fold3d.policy.replicated_segments import Segments
from megatron.fold3d.policy.schedule_word import Part, parts_of

LEAST_GAIN = 0.002  # relative to stock's iteration: a smaller predicted gain is not tried


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChoice:
    """One way to run the iterations of some number of micro-batches.

    Attributes:
        name: the order, as the word of ``--schedule`` begins.
        order: the order of computation, with the weight gradients that it places.
        shares: by stage, the share of DP.sync behind the backwards, if the rest reaches into the
            next iteration; None ends DP.sync with the iteration.
        delayed: segments whose weight gradients are apart from their backwards.
        early: of these, the ones whose DP.sync starts between their weight gradients although it
            may reach into the next iteration, or reduces to shards.
        replicated: segments that every replica steps in full.
        steps_shards: whether the optimizer is distributed.
        reduces_early: whether DP.sync may start between delayed weight gradients.
    """

    name: str
    order: Plan
    shares: tuple[float, ...] | None = None
    delayed: Segments = ()
    early: Segments = ()
    replicated: Segments = ()
    steps_shards: bool = False
    reduces_early: bool = False

    @property
    def behind(self) -> Segments:
        """Of ``delayed``, the segments whose weight gradients follow their own backwards."""
        whole = self.replicated if self.steps_shards else self.delayed
        starts_early = self.reduces_early and not self.defers
        behind = {*self.early, *(whole if starts_early else ())}
        return tuple(segment for segment in self.delayed if segment in behind)

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
        """Return the word of ``--schedule`` that asks for the same."""
        behind = self.behind
        last = tuple(segment for segment in self.delayed if segment not in behind)
        parts = [
            *parts_of("optimizer", [("replicated", self.replicated)]),
            *([Part("step", "next")] if self.defers else []),
            *parts_of("wgrad", [("behind", behind), ("last", last)]),
        ]
        return ":".join([self.name, *map(str, parts)])


def stock_schedule(num_segments: int) -> str:
    """Return the name of stock Megatron's schedule for this number of model chunks."""
    return "interleaved" if num_segments > 1 else "1f1b"

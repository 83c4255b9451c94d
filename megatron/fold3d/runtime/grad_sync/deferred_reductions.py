"""A rank's DP.sync that reaches into the next iteration: how much, in which groups, and how scaled.

The plan says when a part starts. This module knows nothing of optimizer steps: `DeferredSync` waits
for each chunk's reduction.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.fold3d.plan.ir import Action
from megatron.fold3d.plan.parts import part_of
from megatron.fold3d.policy.backward_shares import forwards_before_gather
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups, connect, group_of
from megatron.fold3d.runtime.grad_sync.reductions import Reductions
from megatron.fold3d.runtime.grad_sync.slices import Piece
from megatron.fold3d.runtime.trace.recorder import Recorder, no_end

if TYPE_CHECKING:
    from megatron.fold3d.runtime.grad_sync.measured_shares import AutoShares
    from megatron.fold3d.runtime.preemption.communicator import PreemptiveCommunicator


class DeferredReductions:
    """The reductions of one rank's model chunks, over all iterations; see `DeferredSync`.

    Attributes:
        sums: by chunk, the plan's name for the sum of all of its gradients, for traces.
    """

    def __init__(
        self,
        backward_share: float,
        *,
        slice_bytes: int,
        timeout: timedelta,
        communicator: "PreemptiveCommunicator | None",
        auto: "AutoShares | None",
        recorder: Recorder | None,
    ) -> None:
        self._backward_share = backward_share
        self._timeout = timeout
        self._communicator = communicator
        self._auto, self._recorder = auto, recorder
        self._reductions = Reductions(slice_bytes, self._observe)

        # Known with the first iteration.
        self._chunks: Sequence[Any] = ()
        self._num_bytes = 0  # of all gradients
        self._parameter_bytes: Sequence[int] = ()  # by segment
        self._late_bytes: Sequence[int] = ()  # by segment, gradients that may be reduced late

        # Of the iteration that runs.
        self.sums: Mapping[Any, Action] = {}
        self._shares: tuple[float, ...] = ()
        self._next_shares: tuple[float, ...] = ()
        self._scaling: dict[Any, Any] = {}  # by chunk still being reduced

    def connect_groups(
        self,
        chunks: Sequence[Any],
        reduced_in_iteration: Collection[torch.nn.Parameter],
        groups: ProcessGroupCollection,
    ) -> None:
        """Make the process groups; all ranks of the job call this together.

        Args:
            chunks: the model chunks of this rank.
            reduced_in_iteration: parameters whose gradients are reduced when the iteration ends.
            groups: Megatron's process groups.
        """
        device = next(chunks[0].parameters()).device
        ours = connect(map(group_of, bucket_groups(*chunks)), device, self._timeout)
        if self._communicator is not None:
            ours = {ranks: self._communicator.group(group) for ranks, group in ours.items()}
        self._reductions.connect(chunks, frozenset(reduced_in_iteration), ours)
        if self._auto is not None:
            self._auto.connect(len(chunks), groups.dp_cp, device)
        self._chunks = chunks
        self._num_bytes = sum(
            bucket.grad_data.nbytes for group in bucket_groups(*chunks) for bucket in group.buckets
        )
        self._parameter_bytes = [sum(p.nbytes for p in chunk.parameters()) for chunk in chunks]
        self._late_bytes = [self._reductions.num_bytes(chunk) for chunk in chunks]

    def set_shares(self, shares: Sequence[float]) -> None:
        """From the next iteration on, start ``shares[segment]`` of DP.sync with the backward.

        All replicas of a stage must be given the same shares.
        """
        if not all(0 <= share <= 1 for share in shares):
            raise ValueError(f"shares of DP.sync {shares}: give numbers from 0 to 1")
        self._next_shares = tuple(shares)

    def begin_iteration(self, num_segments: int, *, whole: bool) -> tuple[float, ...]:
        """Begin an iteration, and return its shares by segment: the latest set or measured.

        Args:
            num_segments: the number of model chunks.
            whole: start all of DP.sync with the backward in this iteration.
        """
        if self._auto is not None and (shares := self._auto.begin_iteration()):
            self.set_shares(shares)
        self._shares = self._next_shares or (self._backward_share,) * num_segments
        if whole:
            self._shares = (1.0,) * num_segments
        return self._shares

    def take(self, chunk: Any, unfinished: Collection[torch.Tensor] = ()) -> Sequence[Piece]:
        """Take what is complete of a chunk's gradients; see `Reductions.take`."""
        pieces = self._reductions.take(chunk, unfinished)
        if self._auto is not None and pieces:
            num_bytes = sum(piece.num_bytes for piece in pieces)
            self._auto.ready(self._chunks.index(chunk), num_bytes)
        return pieces

    def start_until(self, chunk: Any, end: int) -> None:
        """Start what lies before ``end`` thousandths of a chunk, if any of it is in flight."""
        self._reductions.start_until(chunk, end)

    def start_left(self) -> None:
        """Start all that was not started, lowest chunk first."""
        self._reductions.start_left()

    def keep(self, chunk: Any) -> None:
        """Start to reduce what Megatron reads when the iteration ends."""
        self._reductions.keep(chunk)

    def finish_kept(self, chunk: Any) -> None:
        """Wait for what `keep` has started."""
        self._reductions.finish_kept(chunk)

    def forwards_before_gathers(self, num_microbatches: int) -> tuple[int, ...]:
        """Return, by segment, how many forwards of the one before overlap what is left of it."""
        return tuple(
            forwards_before_gather(rest, gathered, num_microbatches)
            for rest, gathered in zip(self._rest_bytes(), self._parameter_bytes, strict=True)
        )

    def gather(self, chunk: Any) -> None:
        """Start to gather a chunk's parameters, ahead of the slices that are still to start."""
        self._reductions.gather(chunk)

    def is_running(self, chunk: Any) -> bool:
        """True from the start of a chunk's reduction until it has been waited for."""
        return self._reductions.is_running(chunk)

    def wait_for(self, chunk: Any) -> None:
        """Wait for a chunk's reduction, if one is in flight, then apply a deferred scaling."""
        self._reductions.wait(chunk)
        if (factor := self._scaling.pop(chunk, None)) is not None:
            chunk.scale_gradients(factor)

    def defer_scaling(self, chunk: Any, factor: Any) -> bool:
        """Scale a chunk's gradients once they are reduced; return False if none is in flight."""
        if self._reductions.is_running(chunk):
            self._scaling[chunk] = factor
            return True
        return False

    @property
    def scaling(self) -> Any:
        """Return the factor by which deferred gradients still have to be scaled, or 1.

        All chunks have the same factor.
        """
        return next(iter(self._scaling.values()), 1.0)

    def count_deferred(self, *, is_late: bool) -> None:
        """Record in the trace which share of the gradients was reduced in the next iteration."""
        if self._recorder is not None and self._num_bytes:
            num_bytes = sum(self._rest_bytes()) if is_late else 0
            self._recorder.count("deferred_grad_sync_share", num_bytes / self._num_bytes)

    def _rest_bytes(self) -> list[float]:
        """Return, by segment, what the latest iteration has left for the next one."""
        return [
            (1 - share) * late for share, late in zip(self._shares, self._late_bytes, strict=True)
        ]

    def _observe(self, chunk: Any, end: int, num_bytes: int) -> list[Callable[[], None]]:
        """Note that a chunk starts to reduce ``num_bytes``; return callbacks for its end."""
        ends = []
        if self._auto is not None:
            ends.append(self._auto.open_transfer(num_bytes))
        if self._recorder is not None:
            ends.append(self._recorder.open_span(part_of(self.sums[chunk], end), "grad_sync"))
        return [end for end in ends if end is not no_end]

"""When a rank's deferred DP.sync runs: its backward share at once, the rest in the forward's order.

This module knows nothing of optimizer steps. `DeferredSync` tells it when an iteration begins and
when the backwards are done, and waits for each chunk's reduction.
"""

from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.policy.backward_shares import forwards_before_gather
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups, connect, group_of
from megatron.fold3d.runtime.grad_sync.reductions import Reductions
from megatron.fold3d.runtime.grad_sync.slices import Piece
from megatron.fold3d.runtime.trace.recorder import Recorder, no_end

if TYPE_CHECKING:
    from megatron.fold3d.runtime.grad_sync.measured_shares import AutoShares
    from megatron.fold3d.runtime.preemption.communicator import PreemptiveCommunicator


class DeferredReductions:
    """The reductions of one rank's model chunks, over all iterations; see `DeferredSync`."""

    def __init__(
        self,
        backward_share: float,
        *,
        slice_bytes: int,
        timeout: timedelta,
        communicator: "PreemptiveCommunicator | None",
        auto: "AutoShares | None",
        recorder: Recorder | None,
        is_planned: bool,
    ) -> None:
        self._backward_share = backward_share
        self._timeout = timeout
        self._communicator = communicator
        self._auto, self._recorder = auto, recorder
        self._reductions = Reductions(slice_bytes, self._observe, is_planned=is_planned)

        # Known with the first iteration.
        self._chunks: Sequence[Any] = ()
        self._stages: Sequence[int] = ()
        self._num_bytes = 0  # of all gradients
        self._parameter_bytes: Sequence[int] = ()  # by segment

        # Of the iteration that runs.
        self._shares: Sequence[float] = ()
        self._next_shares: Sequence[float] = ()
        self._scaling: dict[Any, Any] = {}  # by chunk still being reduced
        self._rest_bytes: Sequence[int] = ()  # by segment, when the last backward ended

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
        num_ranks, rank = groups.pp.size(), groups.pp.rank()
        self._stages = [segment * num_ranks + rank for segment in range(len(chunks))]
        self._num_bytes = sum(
            bucket.grad_data.nbytes for group in bucket_groups(*chunks) for bucket in group.buckets
        )
        self._parameter_bytes = [sum(p.nbytes for p in chunk.parameters()) for chunk in chunks]

    def set_shares(self, shares: Sequence[float]) -> None:
        """From the next iteration on, start ``shares[segment]`` of DP.sync with the backward.

        All replicas of a stage must be given the same shares.
        """
        if not all(0 <= share <= 1 for share in shares):
            raise ValueError(f"shares of DP.sync {shares}: give numbers from 0 to 1")
        self._next_shares = tuple(shares)

    @property
    def shares(self) -> Sequence[float]:
        """The shares of the latest iteration, by segment; empty before the first."""
        return self._shares

    def start_until(self, chunk: Any, share: float) -> None:
        """Start a chunk's slices up to ``share`` of all, if its reduction is in flight."""
        self._reductions.start_until(chunk, share)

    def update_shares(self, *, whole: bool) -> None:
        """Begin an iteration with the latest shares that were set or measured.

        Args:
            whole: ignore the shares in this iteration; start all of DP.sync with the backward.
        """
        if self._auto is not None and (shares := self._auto.begin_iteration()):
            self.set_shares(shares)
        self._shares = self._next_shares or [self._backward_share] * len(self._chunks)
        if whole:
            self._shares = [1.0] * len(self._chunks)

    def cut_chunk(self, chunk: Any, unfinished: Collection[torch.Tensor] = ()) -> Sequence[Piece]:
        """Return a chunk's complete gradients as slices for `start_chunk`.

        Args:
            chunk: the model chunk.
            unfinished: parameters, of any shape, whose gradients are not complete. A later call
                returns those.
        """
        slices = self._reductions.cut(chunk, unfinished)
        if self._auto is not None:
            self._auto.ready(self._chunks.index(chunk), sum(part.num_bytes for part in slices))
        return slices

    def start_chunk(self, chunk: Any, slices: Sequence[Piece], *, are_last: bool) -> None:
        """Start to reduce the backward share of a chunk, as far as its slices are complete."""
        share = self._shares[self._chunks.index(chunk)]
        self._reductions.start_slices(chunk, slices, share, are_last=are_last)

    def finish_backward(self) -> None:
        """Start the first chunk's remaining slices; wait for what is reduced in the iteration."""
        self._rest_bytes = [self._reductions.rest_bytes(chunk) for chunk in self._chunks]
        self._reductions.finish_backward()

    def start_rest(self) -> None:
        """Start the remaining slices of all chunks, lowest chunk first."""
        self._reductions.start_rest()

    def start_next(self, chunk: Any) -> None:
        """Start the remaining slices of the chunk whose forward follows that of ``chunk``.

        Where the plan has slices, it starts them.
        """
        if not self._reductions.is_planned:
            for following in self._chunks[self._chunks.index(chunk) + 1 :][:1]:
                self._reductions.start_rest_of(following)

    def forwards_before_gathers(self, num_microbatches: int) -> tuple[int, ...]:
        """Return, by segment, how many forwards of the one before its remaining slices overlap."""
        return tuple(
            forwards_before_gather(rest, gathered, num_microbatches)
            for rest, gathered in zip(self._rest_bytes, self._parameter_bytes, strict=True)
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
            num_bytes = sum(self._rest_bytes) if is_late else 0
            self._recorder.count("deferred_grad_sync_share", num_bytes / self._num_bytes)

    def _observe(self, chunk: Any, num_bytes: int) -> list[Callable[[], None]]:
        """Note that a chunk starts to reduce ``num_bytes``; return callbacks for its end."""
        ends = []
        if self._auto is not None:
            ends.append(self._auto.open_transfer(num_bytes))
        if self._recorder is not None:
            stage = self._stages[self._chunks.index(chunk)]
            ends.append(self._recorder.open_span(Action(stage, Op.REDUCE_GRAD), "grad_sync"))
        return [end for end in ends if end is not no_end]

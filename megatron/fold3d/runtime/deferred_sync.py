"""DP.sync that reaches into the next iteration: the paper's free split (Algorithm 2).

A part of each model chunk's gradients is reduced as soon as its last backward is through, the rest
when all backwards are, in the order in which the next forward needs the chunks. Right before its
first forward a chunk waits for its gradients and takes the optimizer step of their iteration.

Keeps one invariant: from the start of its reduction until its step, nobody else reads a chunk's
gradients, adds to them or zeroes them, and nobody reads its parameters.
"""

import logging
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core.utils import log_single_rank

from megatron.fold3d.runtime.late_step import LateStep

logger = logging.getLogger(__name__)

_SLICE_BYTES = 1 << 20  # what a running slice delays, at most, that is needed sooner

_Slice = tuple[torch.Tensor, Any, dist.ProcessGroup]  # with what is done over whom


class DeferredSync:
    """Reductions and optimizer steps of one rank's model chunks, over all iterations.

    Every replica of a chunk starts the same slices in the same order, in process groups that
    nothing else uses: Megatron's own collectives, such as the mean of the losses, would stand in
    the queue behind them. A started reduction becomes *due* when Megatron asks for the optimizer
    step; before, an iteration that is run again drops it.
    """

    def __init__(self, backward_share: float, timeout: timedelta) -> None:
        self._backward_share = backward_share
        self._timeout = timeout
        self._chunks: Sequence[Any] = ()
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._rest: dict[Any, list[_Slice]] = {}
        self._running: dict[Any, list[dist.Work]] = {}
        self._due: set[Any] = set()
        self._step: LateStep | None = None

    def prepare(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Make the process groups, at the first call; all ranks of the job call this together."""
        if not self._chunks:
            ours = {_ranks(group.data_parallel_group) for group in _bucket_groups(*chunks)}
            self._groups = _make_groups(ours, next(chunks[0].parameters()).device, self._timeout)
            self._chunks = chunks

    def start(self, chunk: Any) -> None:
        """Start to reduce the backward share of a chunk's gradients, which are complete."""
        assert chunk not in self._running, "its gradients were not waited for"
        works, rest = self._running.setdefault(chunk, []), self._rest.setdefault(chunk, [])
        for bucket_group in _bucket_groups(chunk):
            _make_ready(bucket_group)
            average = bucket_group.ddp_config.average_in_collective
            op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
            group = self._groups[_ranks(bucket_group.data_parallel_group)]
            for bucket in bucket_group.buckets:
                cut = round(bucket.grad_data.numel() * self._backward_share)
                works += [_reduce(part, op, group) for part in _slices(bucket.grad_data[:cut])]
                rest += [(part, op, group) for part in _slices(bucket.grad_data[cut:])]

    def start_rest(self) -> None:
        """Start what is left of all chunks: the backwards of the iteration are through."""
        for chunk in self._chunks:
            self._running.get(chunk, []).extend(_reduce(*s) for s in self._rest.pop(chunk, ()))

    def settle(self, chunk: Any) -> None:
        """Wait for the gradients of the iteration before, step with them and zero them."""
        if chunk in self._due:
            assert self._step is not None
            self._wait(chunk)
            self._step.take(chunk.parameters())
            self._due.remove(chunk)
            chunk.zero_grad_buffer()

    def step(self, optimizer: Any, iteration: int) -> None:
        """Step what is not deferred; what is will be when it is settled, as if it were now."""
        self._finish_step()
        self._step = LateStep(optimizer, iteration)
        here = [p for c in self._chunks if c not in self._running for p in c.parameters()]
        if here:
            self._step.take(here)
        self._due = set(self._running)

    def may_zero(self, chunk: Any) -> bool:
        """Whether a chunk's gradients may be zeroed; they may not while its step is due."""
        if chunk in self._due:
            return False
        self._wait(chunk)  # the iteration is given up or run again
        return True

    def drain(self) -> None:
        """Settle everything: parameters are then those of the last iteration, for all to read."""
        for chunk in self._chunks:
            self.settle(chunk)
        self._finish_step()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Drain at the end of a run; after an error there may be nobody left to wait for."""
        if error is None or issubclass(error, SystemExit):
            self.drain()
            for chunk in list(self._running):
                self._wait(chunk)

    def _wait(self, chunk: Any) -> None:
        for work in self._running.pop(chunk, ()):
            work.wait()

    def _finish_step(self) -> None:
        """Tell the norm of the gradients of an iteration, as soon as all are known."""
        assert not self._due, "a chunk ran no forward since its step became due"
        if self._step is not None:
            norm, iteration = self._step.grad_norm(), self._step.iteration
            log_single_rank(logger, logging.INFO, "grad norm of iteration %s: %s", iteration, norm)
            self._step = None


def _bucket_groups(*chunks: Any) -> Iterator[Any]:
    for chunk in chunks:
        yield from chunk.bucket_groups
        yield from chunk.expert_parallel_bucket_groups


def _make_ready(bucket_group: Any) -> None:
    """Do what Megatron's ``start_grad_sync`` does before it reduces, and end it for this iteration.

    ``finalize_model_grads`` then finds the reduction finished and touches it no more.
    """
    config = bucket_group.ddp_config
    if config.check_for_nan_in_grad or config.check_for_large_grads:
        bucket_group.check_grads(
            check_for_nan_or_inf=config.check_for_nan_in_grad,
            check_for_large=config.check_for_large_grads,
        )
    for bucket in bucket_group.buckets:
        if bucket.gradient_scaling_factor != 1.0:
            bucket.grad_data *= bucket.gradient_scaling_factor
    bucket_group.grad_reduce_finished = True


def _slices(data: torch.Tensor) -> Sequence[torch.Tensor]:
    return data.split(_SLICE_BYTES // data.element_size()) if data.numel() else ()


def _reduce(part: torch.Tensor, op: Any, group: dist.ProcessGroup) -> dist.Work:
    work: dist.Work | None = dist.all_reduce(part, op, group=group, async_op=True)
    assert work is not None
    return work


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _make_groups(
    ours: AbstractSet[tuple[int, ...]], device: torch.device, timeout: timedelta
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make a new group over the ranks of each data-parallel group, all ranks in the same order."""
    everyones: list[set[tuple[int, ...]]] = [set() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyones, ours)
    made = {}
    for ranks in sorted(set().union(*everyones)):
        group = dist.new_group(ranks, timeout=timeout)
        if dist.get_rank() in ranks:
            made[ranks] = group
            dist.all_reduce(torch.zeros(1, device=device), group=group)  # NCCL connects here
    return made

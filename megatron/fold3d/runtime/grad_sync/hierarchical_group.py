"""A process group that sums inside each node first, and then across nodes.

Three collectives replace one all-reduce. All nodes have the same number of ranks in the group:

    inside    reduce-scatter   each rank of a node gets the node's sum of one part of the tensor
    across    all-reduce       ranks that hold the same part, one on each node, sum it
    inside    all-gather       each rank gets all parts

A node sends 2 (n - 1)/n of a tensor's bytes to others, with n nodes of g ranks, where a ring over
all ranks sends 2 (n g - 1)/(n g) of them.

The distributed optimizer's shards are contiguous: rank j g + i, the i-th of node j, owns shard
j g + i. So for each node j the shards j g to j g + g - 1 are one block:

    inside    n reduce-scatters   rank i has the node's sums of shards i, g + i, 2 g + i, ...
    across    reduce-scatter      of these shards, copied side by side; each rank gets its own

An all-gather runs the two steps in reverse. Each sends half the bytes of an all-reduce.

Keeps one invariant: within a group, all ranks start the same collectives in the order of the calls,
even though the second and the third collective of a call start later. For this reason the
reduce-scatters inside nodes and the all-gathers inside nodes have a process group each.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.fold3d.runtime.device import runs_behind, streams_of

Works = list[Any]
Steps = Iterator[Works]
"""Starts the next of the three collectives when it is advanced, and yields its works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """The process groups of a rank's three collectives; nothing else uses them.

    Attributes:
        scattering: the ranks of this rank's node, for reduce-scatters.
        across: one rank of each node: those with this rank's index in their node.
        gathering: the ranks of this rank's node, for all-gathers.
    """

    scattering: dist.ProcessGroup
    across: dist.ProcessGroup
    gathering: dist.ProcessGroup


class HierarchicalGroup(dist.ProcessGroup):
    """A process group over ranks of several nodes, whose all-reduce takes three steps.

    It implements only the methods that Megatron's buckets and our slices call: ``allreduce``,
    ``reduce_scatter_single`` and ``all_gather_single``, and the coalesced form of each.

    Tensors are the caller's: contiguous, of any shape and dtype, and complete on the stream that is
    current at the call, after which nothing may write them. Each method returns a task that acts as
    `dist.Work`; results are valid on the stream that is current in its ``wait``.

    Args:
        ranks: global ranks, sorted; every node has the same number of them.
        levels: the process groups of the three steps.
        device: the device of the tensors.
    """

    def __init__(self, ranks: Sequence[int], levels: Levels, device: torch.device) -> None:
        super().__init__(ranks.index(dist.get_rank()), len(ranks))  # type: ignore[call-arg]
        self.levels = levels
        # torch's own functions look a group up by its object.
        known = dist.distributed_c10d._world
        known.pg_map[self] = known.pg_map[levels.across]
        known.pg_group_ranks[self] = {rank: place for place, rank in enumerate(ranks)}
        self._run: Callable[[Steps], Any]
        if runs_behind(device):
            streams = streams_of(device)
            self._run = _Streams(streams, [streams.Stream(device) for _ in range(3)]).run
        else:
            self._run = _Threads(f"sums over ranks {[*ranks]}").run

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any = None) -> Any:  # type: ignore[override]
        """Start an in-place all-reduce of tensors."""
        op = options.reduceOp if options is not None else dist.ReduceOp.SUM
        return self._run(_steps(self.levels, [tensor.view(-1) for tensor in tensors], op))

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], options: Any = None) -> Any:
        """Start to all-reduce several tensors, as one task."""
        return self.allreduce(tensors, options)

    def reduce_scatter_single(
        self, output: torch.Tensor, whole: torch.Tensor, options: Any = None
    ) -> Any:
        """Start to reduce-scatter a tensor, whose other shards may be overwritten."""
        return self.reduce_scatter_single_coalesced([output], [whole], options)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], options: Any = None
    ) -> Any:
        """Start to reduce-scatter several tensors, as one task."""
        op = options.reduceOp if options is not None else dist.ReduceOp.SUM
        return self._run(_scatter_steps(self.levels, _flat(outputs), _flat(wholes), op))

    def all_gather_single(
        self, whole: torch.Tensor, shard: torch.Tensor, options: Any = None
    ) -> Any:
        """Start to gather a tensor from its shards."""
        return self.all_gather_single_coalesced([whole], [shard], options)

    def all_gather_single_coalesced(
        self, wholes: Sequence[torch.Tensor], shards: Sequence[torch.Tensor], _: Any = None
    ) -> Any:
        """Start to gather several tensors, as one task."""
        return self._run(_gather_steps(self.levels, _flat(wholes), _flat(shards)))

    # What torch called them before 2.13.
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    _allgather_base = all_gather_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]


def _flat(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.view(-1) for tensor in tensors]


def _steps(levels: Levels, tensors: Sequence[torch.Tensor], op: Any) -> Steps:
    """Start the three collectives one by one; yield the works of each.

    If the number of ranks of a node does not divide the tensor, the remaining elements, fewer than
    there are ranks, are summed by all ranks. All add the same terms in the same order, so the
    results have the same bits.
    """
    rank, size = levels.scattering.rank(), levels.scattering.size()
    wholes = [tensor[: tensor.numel() // size * size] for tensor in tensors]
    tails = [tensor[tensor.numel() // size * size :] for tensor in tensors]
    wholes, tails = ([part for part in parts if part.numel()] for parts in (wholes, tails))
    shards = [whole.chunk(size)[rank] for whole in wholes]

    def all_reduced(parts: Sequence[torch.Tensor], group: dist.ProcessGroup) -> Works:
        return [dist.all_reduce(part, op, group=group, async_op=True) for part in parts]

    yield [
        dist.reduce_scatter_tensor(shard, whole, op, group=levels.scattering, async_op=True)
        for shard, whole in zip(shards, wholes, strict=True)
    ] + all_reduced(tails, levels.scattering)
    yield all_reduced([*shards, *tails], levels.across)
    yield [
        dist.all_gather_into_tensor(whole, shard, group=levels.gathering, async_op=True)
        for shard, whole in zip(shards, wholes, strict=True)
    ]


def _blocks(levels: Levels, whole: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return for each node the block of its ranks' shards, and this rank's place in it."""
    rank, size = levels.scattering.rank(), levels.scattering.size()
    return [(block, block.chunk(size)[rank]) for block in whole.chunk(levels.across.size())]


def _scatter_steps(
    levels: Levels, outputs: Sequence[torch.Tensor], wholes: Sequence[torch.Tensor], op: Any
) -> Steps:
    """Yield the works of a reduce-scatter inside, and of one across; the third step has none."""
    blocks = [_blocks(levels, whole) for whole in wholes]
    yield [
        dist.reduce_scatter_tensor(part, block, op, group=levels.scattering, async_op=True)
        for of_whole in blocks
        for block, part in of_whole
    ]
    together = [torch.cat([part for _, part in of_whole]) for of_whole in blocks]
    yield [
        dist.reduce_scatter_tensor(output, parts, op, group=levels.across, async_op=True)
        for output, parts in zip(outputs, together, strict=True)
    ]
    yield []


def _gather_steps(
    levels: Levels, wholes: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]
) -> Steps:
    """Yield no work first, so that earlier sums across nodes go first; then across, then inside."""
    yield []
    together = [shard.new_empty(levels.across.size() * shard.numel()) for shard in shards]
    yield [
        dist.all_gather_into_tensor(parts, shard, group=levels.across, async_op=True)
        for parts, shard in zip(together, shards, strict=True)
    ]
    blocks = [_blocks(levels, whole) for whole in wholes]
    for of_whole, parts in zip(blocks, together, strict=True):
        for (_, part), arrived in zip(of_whole, parts.chunk(len(of_whole)), strict=True):
            part.copy_(arrived)
    yield [
        dist.all_gather_into_tensor(block, part, group=levels.gathering, async_op=True)
        for of_whole in blocks
        for block, part in of_whole
    ]


class _Streams:
    """Runs the steps on a device that works asynchronously.

    Each step has a stream of its own, so that one tensor's sum across nodes overlaps the next one's
    sum inside nodes. The host never blocks. **No GPU has run this.**
    """

    def __init__(self, streams: Any, of_steps: Sequence[Any]) -> None:
        self._streams, self._of_steps = streams, of_steps

    def run(self, steps: Steps) -> "_StreamedSum":
        """Launch all steps."""
        works: Works = []
        before = self._streams.current_stream()
        for stream in self._of_steps:
            stream.wait_stream(before)
            before = stream
            with self._streams.stream(stream):
                for work in works:
                    work.wait()
                works = next(steps) or works
        with self._streams.stream(self._of_steps[-1]):
            for work in works:
                work.wait()
            done = self._streams.Event()
            done.record()
        return _StreamedSum(self._streams, done, works)


@dataclass(frozen=True, slots=True)
class _StreamedSum:
    """A sum that has been launched; the device passes the event ``done`` when it is complete."""

    streams: Any
    done: Any
    works: Works

    def wait(self, _timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the sum."""
        self.streams.current_stream().wait_event(self.done)
        return True

    def is_completed(self) -> bool:
        """Whether the sum is complete."""
        return bool(self.done.query())

    def get_future(self) -> Any:
        """Return a future that completes with the last step, if the backend has futures."""
        return torch.futures.collect_all([work.get_future() for work in self.works])


class _Threads:
    """Runs the steps where a wait blocks the host: the second and third step have a thread each."""

    def __init__(self, name: str) -> None:
        self._across, self._gathering = (_Line(f"{step}, {name}") for step in ("across", "gather"))

    def run(self, steps: Steps) -> "_ThreadedSum":
        """Start the first step; queue each other step behind the same step of earlier sums."""
        made = _ThreadedSum(steps)

        def cross() -> None:
            made.advance()
            self._gathering.put(finish)

        def finish() -> None:
            made.advance()
            made.end()

        self._across.put(cross)
        return made


class _ThreadedSum:
    """A sum in flight; the constructor starts its first step."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._works = next(steps)
        self._over = threading.Event()
        self._future: torch.futures.Future[None] = torch.futures.Future()
        self._error: BaseException | None = None

    def advance(self) -> None:
        """Wait for the running step, start the next one and wait for it, unless a step failed."""
        if self._error is not None:
            return
        try:
            for work in self._works:
                work.wait()
            self._works = next(self._steps)
            for work in self._works:
                work.wait()
        except Exception as error:  # noqa: BLE001  # raised by `wait`
            self._error = error

    def end(self) -> None:
        """Mark the sum as ended, which wakes up threads that wait for it."""
        self._works.clear()
        self._over.set()
        self._future.set_result(None)

    def wait(self, _timeout: timedelta | None = None) -> bool:
        """Block until the sum is complete; each step is subject to its group's timeout.

        Raises:
            RuntimeError: a step failed.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether the sum has ended, with a result or an error."""
        return self._over.is_set()

    def get_future(self) -> "torch.futures.Future[None]":
        """Return a future that completes when the sum has ended, with a result or an error."""
        return self._future


class _Line:
    """A daemon thread that runs calls one after the other."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def put(self, call: Callable[[], None]) -> None:
        """Queue a call behind all earlier ones."""
        self._calls.put(call)

    def _loop(self) -> None:
        while True:
            self._calls.get()()

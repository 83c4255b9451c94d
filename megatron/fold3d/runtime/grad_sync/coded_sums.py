"""``--coded-grad-reduce``: reduce-scatters of gradients in fewer bits, bit for bit.

Most gradients of a bucket have exponents near each other. Those in fp32 that are sums of bf16 ones
also end in zeros. So a replica sends the other replicas their shards of its gradients in a code,
and each adds up what it receives:

    replica 0   backward ─ encode shard 1 ─┐            ┌ decode shard 0, add
    replica 1   backward ─ encode shard 0 ─┴ all-to-all ┴ decode shard 1, add

The sum of two replicas is the same in any order. Those of more are added in the order of a ring,
which begins behind the shard's own replica; a library that adds in another order rounds otherwise.

The length of a message depends on its values, and nobody may wait for the device in the backward.
So sums of one size have a room, a little more than the longest message of the last ones. A message
begins with the lengths that its sender needed towards all replicas. They are read when the sum is
waited for, at the end of the iteration, so all replicas know the same lengths. If one was longer
than the room, the gradients are summed whole: nobody has written them since.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import log_single_rank

from megatron.fold3d.runtime.agreement import gathered
from megatron.fold3d.runtime.device import free_device_bytes
from megatron.fold3d.runtime.grad_sync.bucket_groups import (
    Ranks,
    bucket_groups,
    group_of,
    is_sharded,
    ranks_of,
)
from megatron.fold3d.runtime.grad_sync.delta_code import (
    SPARE_WORDS,
    WORD,
    WORTH,
    decode_gradients,
    encode_gradients,
    table_words,
)
from megatron.fold3d.runtime.measure.timing import seconds

logger = logging.getLogger(__name__)

Scatter = Callable[..., Any]
_Key = tuple[Ranks, int]
"""The replicas of a sum, and the number of its gradients."""

_DTYPES = (torch.bfloat16, torch.float32)  # with exponents of 8 bits
_ALIGNED_WORDS = 4  # NCCL sends byte by byte where a message begins between 16-byte words
_FIRST_SPARED = 4  # bits of a gradient that the first sum of a size has no room for
_LEAST_SPARED = 1  # with fewer, gradients are summed whole
_RESTS = 100  # sums of such a size, before one is coded again
_TIMED = 1 << 20  # gradients in the sums that measure the links


class CodedSums:
    """The reduce-scatters of one rank's gradients, coded where that is shorter.

    Args:
        measures: whether the first sum of each group of replicas measures if coding is faster than
            sending whole gradients, and if memory has room for messages; if not, the group's
            gradients are not coded.
        num_chunks: how many model chunks a rank has.
    """

    def __init__(self, *, measures: bool, num_chunks: int = 1) -> None:
        self._measures, self._num_chunks = measures, num_chunks
        self._is_faster: dict[Ranks, bool] = {}  # where it was measured
        self._rooms: dict[_Key, int] = {}  # words of the code of a shard
        self._rests: dict[_Key, int] = {}  # how many sums are whole
        self._started: list[_Sum] = []
        self._coded_bytes = self._whole_bytes = 0

    def start(
        self, upstream: Callable[[Any, bool], None], group: Any, force_all_reduce: bool = False
    ) -> None:
        """Start the sums of a bucket group of DDP, whose handle has to wait for coded ones too."""
        self._started = []
        if self._measures and is_sharded(group) and not force_all_reduce:
            for bucket in group.buckets:
                self._measure(bucket.grad_data, group_of(group))
        upstream(group, force_all_reduce)
        if group.grad_reduce_handle is not None:
            for started in self._started:
                group.grad_reduce_handle.append(started)

    @torch.no_grad()
    def reduce_scatter(
        self,
        upstream: Scatter,
        output: torch.Tensor,
        gradients: torch.Tensor,
        op: Any,
        group: dist.ProcessGroup,
        async_op: bool,
    ) -> Any:
        """Sum gradients to shards as ``dist.reduce_scatter_tensor`` does.

        Args:
            output: ``[num_elements / replicas]``, for the sum of this replica's shard; it may be
                the shard itself.
            gradients: ``[num_elements]``, contiguous.
        """
        if not self._codes(gradients, op, group):
            return upstream(output, gradients, op=op, group=group, async_op=async_op)
        started = _Sum(self, output, gradients, group, self.room(gradients, group))
        if not async_op:
            started.wait()
            return None
        self._started.append(started)
        return started

    def room(self, gradients: torch.Tensor, group: dist.ProcessGroup) -> int:
        """Return the words that the code of a shard may take, the same on all replicas.

        Args:
            gradients: ``[num_elements]``, of all shards.
        """
        first = _shard_words(gradients, group, _FIRST_SPARED)
        return self._rooms.get(_key(gradients, group), first)

    def share(self, chunk: Any) -> float:
        """Return which part of a model chunk's gradients the sums of its buckets send."""
        sent = whole = 0
        for bucket_group in bucket_groups(chunk):
            group = group_of(bucket_group)
            for bucket in bucket_group.buckets:
                gradients, room = bucket.grad_data, self._rooms.get(_key(bucket.grad_data, group))
                whole += gradients.nbytes
                coded = room and _coded_bytes(group.size(), room)
                sent += coded or gradients.nbytes
        return sent / max(1, whole)

    def fits(
        self,
        gradients: torch.Tensor,
        group: dist.ProcessGroup,
        sizes: list[list[int]],
        room: int,
    ) -> bool:
        """Note what the messages of a sum needed; return whether all of them fit.

        Sums of one size share a room, which has a spare part. It shrinks by much less between two
        of them, so the longest of an iteration fits in the next one too.

        Args:
            gradients: ``[num_elements]``, of all shards.
            sizes: the words that each replica needed towards each.
            room: the words that each had.
        """
        key, most = _key(gradients, group), max(map(max, sizes))
        known = self._rooms.get(key, 0)
        self._rooms[key] = max(most + most // 32, known - known // 1024)
        if most > _shard_words(gradients, group, _LEAST_SPARED):
            self._rests[key] = _RESTS
            del self._rooms[key]
        sent = _coded_bytes(group.size(), room)
        self._coded_bytes += sent if most <= room else sent + gradients.nbytes
        self._whole_bytes += gradients.nbytes
        return most <= room

    def tell(self) -> None:
        """Log at the end of a run what part of the gradients was sent."""
        if self._whole_bytes:
            log_single_rank(
                logger,
                logging.INFO,
                "gradients were summed in %.1f%% of their bytes, padding included",
                100 * self._coded_bytes / self._whole_bytes,
            )

    def _codes(self, gradients: torch.Tensor, op: Any, group: dist.ProcessGroup) -> bool:
        if op != dist.ReduceOp.SUM or not _can_code(gradients, group):
            return False
        if self._measures:
            self._measure(gradients, group)
        if not self._is_faster.get(ranks_of(group), True):
            return False
        key = _key(gradients, group)
        rests = self._rests.get(key, 0)
        self._rests[key] = max(0, rests - 1)
        return rests == 0

    def _measure(self, gradients: torch.Tensor, group: dist.ProcessGroup) -> None:
        """Decide once if coding is faster for some replicas, which decide together.

        It cannot be done while DDP starts several collectives as one.
        """
        if ranks_of(group) in self._is_faster or not _can_code(gradients, group):
            return
        replicas, device = group.size(), gradients.device
        shard = gradients.chunk(replicas)[group.rank()]
        longest = table_words(shard) + 2 * shard.nbytes // WORD + _ALIGNED_WORDS  # any bits fit
        message = torch.empty(longest, dtype=torch.int32, device=device)

        def coded() -> None:
            encode_gradients(shard, message)
            decode_gradients(message, torch.empty_like(shard))

        def scattered() -> None:
            dist.reduce_scatter_tensor(sums, whole, group=group)

        def exchanged() -> None:
            dist.all_to_all_single(received, sent, group=group)

        coding_s = (replicas - 1) * seconds(coded, device, 1, warm_up=1)
        needed = max(gathered(int(message[0]), group))
        share = _coded_bytes(replicas, needed) / gradients.nbytes
        whole = torch.zeros(min(gradients.numel(), _TIMED), device=device)
        whole = whole[: whole.numel() // replicas * replicas]
        sums = torch.empty_like(whole.chunk(replicas)[0])
        sent = whole[: int(share * sums.numel()) * replicas]
        received = torch.empty_like(sent)
        whole_s = seconds(scattered, device, 1, warm_up=1)
        sent_s = seconds(exchanged, device, 1, warm_up=1)
        saved_s = (whole_s - sent_s) * gradients.nbytes / whole.nbytes
        free_bytes = free_device_bytes(device)
        held_bytes = 2 * self._num_chunks * gradients.untyped_storage().nbytes()  # of all messages
        has_room = free_bytes is None or free_bytes > held_bytes
        is_faster = all(gathered(has_room and saved_s > WORTH * coding_s, group))
        self._is_faster[ranks_of(group)] = is_faster
        log_single_rank(
            logger,
            logging.INFO,
            "--coded-grad-reduce auto: a code saves %.3g s of the first sum of gradients and takes "
            "%.3g s%s, so it is %s",
            *(saved_s, coding_s, "" if has_room else ", and memory has no room for its messages"),
            "on" if is_faster else "off",
        )


class _Sum:
    """The sum of a bucket in flight.

    Attributes:
        all_to_all_handle: the work of its messages, named as that of Megatron's own all-to-all.
    """

    def __init__(
        self,
        sums: CodedSums,
        output: torch.Tensor,
        gradients: torch.Tensor,
        group: dist.ProcessGroup,
        room: int,
    ) -> None:
        self._sums, self._output, self._group = sums, output, group
        self._gradients, self._room = gradients, room
        replicas, here = group.size(), group.rank()
        words = _message_words(replicas, room)
        self._sent = torch.empty(replicas, words, dtype=torch.int32, device=gradients.device)
        memory = self._sent.new_empty(replicas * words + SPARE_WORDS)
        self._received = memory[:-SPARE_WORDS].view(replicas, words)
        for rank, (shard, message) in enumerate(
            zip(gradients.chunk(replicas), self._sent, strict=True)
        ):
            if rank != here:
                encode_gradients(shard, message[replicas : replicas + room])
        self._sent[here, replicas] = 0  # nothing is sent to itself
        self._sent[:, :replicas] = self._sent[:, replicas]
        self.all_to_all_handle: Any = dist.all_to_all_single(
            self._received, self._sent, group=group, async_op=True
        )

    def get_future(self) -> Any:
        """Return a future that is done when the messages are there."""
        return self.all_to_all_handle.get_future()

    def is_completed(self) -> bool:
        """Return True if the messages are there."""
        return bool(self.all_to_all_handle.is_completed())

    @torch.no_grad()
    def wait(self) -> None:
        """Wait for the messages, and add them up in the own shard."""
        self.all_to_all_handle.wait()
        replicas, here = self._group.size(), self._group.rank()
        sizes = self._received[:, :replicas].tolist()
        if not self._sums.fits(self._gradients, self._group, sizes, self._room):
            dist.reduce_scatter_tensor(self._output, self._gradients, group=self._group)
            return
        ring = (*range(here + 1, replicas), *range(here))
        total = self._decoded(ring[0])
        for rank in ring[1:]:
            total += self._decoded(rank)
        torch.add(total, self._gradients.chunk(replicas)[here], out=self._output)
        del self._sent, self._received

    def _decoded(self, rank: int) -> torch.Tensor:
        """Return the gradients of the own shard that a replica has sent."""
        values = torch.empty_like(self._output)
        decode_gradients(self._received[rank, self._group.size() :], values)
        return values


def _can_code(gradients: torch.Tensor, group: dist.ProcessGroup) -> bool:
    replicas = group.size()
    is_even = gradients.numel() % replicas == 0
    return replicas > 1 and gradients.dtype in _DTYPES and is_even


def _key(gradients: torch.Tensor, group: dist.ProcessGroup) -> _Key:
    return ranks_of(group), gradients.numel()


def _shard_words(gradients: torch.Tensor, group: dist.ProcessGroup, spared: int) -> int:
    """Return the words of a shard's code that spares so many bits of each gradient."""
    shard = gradients.chunk(group.size())[0]
    return table_words(shard) + shard.numel() * (8 * shard.element_size() - spared) // 32


def _message_words(replicas: int, room: int) -> int:
    """Return the words of a message: all lengths of its sender, and the code."""
    words = replicas + room
    return words + -words % _ALIGNED_WORDS


def _coded_bytes(replicas: int, room: int) -> int:
    return WORD * replicas * _message_words(replicas, room)

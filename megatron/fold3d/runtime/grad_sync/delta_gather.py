"""``--delta-param-gather``: all-gathers of what an optimizer step has changed, bit for bit.

With the distributed optimizer each replica steps its shard of the parameters, and then all replicas
gather the parameters, 16 bits each. But every replica holds the old parameters, and a step moves
most of them by a few units in the last place. So a replica sends the differences, in Rice's code,
and the others decode the new parameters in place.

The length of a message depends on the new values. Replicas exchange the lengths right after the
step, where ``train_step`` waits for the device anyway, and the all-gather of a bucket uses the
longest. With its lengths each replica sends a checksum of the old parameters that it holds. If
checksums differ, the bucket is gathered whole, and a warning names the replicas. So a replica that
has drifted is healed, and code that loads or changes parameters need not report that here.

DDP and the plan still decide when all-gathers start, in which groups, and who waits. A message is
decoded on the stream that waits for it, and has no stream of its own: if all streams share one
hardware queue, a kernel that waits would block every kernel that is launched later.

Keeps one invariant: a message is decoded from the same old values that it was coded from. All
replicas held these values when it was coded, and nobody writes them until it is decoded.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import log_single_rank

from megatron.fold3d.runtime.agreement import gathered
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups, group_of, ranks_of
from megatron.fold3d.runtime.grad_sync.delta_code import (
    MANTISSAS,
    SPARE_WORDS,
    WORD,
    WORTH,
    checksum,
    decode,
    encode,
)
from megatron.fold3d.runtime.measure.timing import clock, seconds

logger = logging.getLogger(__name__)

_TIMED_BYTES = 1 << 22  # of the gather that measures the links
_ALIGNED_WORDS = 4  # NCCL gathers byte by byte where a replica's part begins between 16-byte words


class DeltaGather:
    """The all-gathers of one rank's parameters, coded where that is shorter.

    Args:
        measures: whether to measure in the first step if coding is faster than gathering whole, and
            not to code otherwise.
    """

    def __init__(self, *, measures: bool) -> None:
        self._measures = measures
        self._is_faster: dict[Any, bool] = {}  # by optimizer, where it was measured
        self._messages: dict[Any, torch.Tensor] = {}  # by bucket, until it is gathered
        self._link_bytes: dict[Any, int] = {}  # by bucket, of all replicas' latest messages
        self._coded_bits = self._coded_values = 0

    @torch.no_grad()
    def step(self, upstream: Callable[[Any], bool], optimizer: Any) -> bool:
        """Take a step of one of Megatron's optimizers; code the changes of its buckets."""
        buckets = [*self._coded(optimizer)]
        shards = [_own_shard(bucket, optimizer.data_parallel_group) for bucket in buckets]
        olds = [shard.clone() for shard in shards]
        sums = [checksum(bucket.param_data) for bucket in buckets]
        success = upstream(optimizer)
        if not buckets:
            return success
        replicas, device = optimizer.data_parallel_group, shards[0].device
        is_measured = self._measures and optimizer not in self._is_faster
        passed_s = clock(device) if is_measured else None
        messages = [encode(shard, old) for shard, old in zip(shards, olds, strict=True)]
        coding_s = passed_s() if passed_s is not None else 0.0
        sizes = torch.stack([message[0] for message in messages])
        found = torch.cat([sizes.long(), torch.stack(sums)])
        everyones = found.new_empty(replicas.size() * found.numel())
        dist.all_gather_into_tensor(everyones, found, group=replicas)
        of_replicas = everyones.view(replicas.size(), 2, len(buckets)).unbind(1)
        of_sizes, of_sums = (told.tolist() for told in of_replicas)
        longest = map(max, zip(*of_sizes, strict=True))
        agree = [len(set(of_bucket)) == 1 for of_bucket in zip(*of_sums, strict=True)]
        for bucket, message, size, agrees in zip(buckets, messages, longest, agree, strict=True):
            size += -size % _ALIGNED_WORDS
            if agrees and WORD * size < bucket.param_data.nbytes // replicas.size():
                self._messages[bucket] = message[:size]
                self._link_bytes[bucket] = WORD * size * replicas.size()
        if not all(agree) and replicas.rank() == 0:
            self._warn_of_drift(of_sums, replicas)
        if passed_s is not None:
            self._measure(optimizer, buckets, olds, coding_s)
        return success

    def start(
        self, upstream: Callable[[Any, bool], None], group: Any, force_sync: bool = False
    ) -> None:
        """Start the all-gathers of a bucket group; buckets with a message gather the message."""
        is_running = group.param_gather_handle is not None
        if is_running or not any(bucket in self._messages for bucket in group.buckets):
            return upstream(group, force_sync)
        messages = [self._messages.pop(bucket, None) for bucket in group.buckets]
        gather = _Gather(group, messages)
        for bucket, message in zip(group.buckets, messages, strict=True):
            if message is not None:
                self._coded_bits += 8 * self._link_bytes[bucket]
                self._coded_values += bucket.param_data.numel()
        overlaps = group.ddp_config.overlap_param_gather
        if overlaps and not force_sync:
            group.param_gather_handle = gather
        else:
            gather.wait()
            if overlaps and hasattr(group, "_post_param_sync"):  # from Megatron-core 0.18 on
                group._post_param_sync()
        group.param_gather_dispatched = True
        return None

    def link_bytes(self, chunk: Any) -> int | None:
        """Return the bytes that the all-gathers of a model chunk bring to each replica.

        None if none of them is coded behind the latest step.
        """
        buckets = [bucket for group in bucket_groups(chunk) for bucket in group.buckets]
        if not any(bucket in self._link_bytes for bucket in buckets):
            return None
        return sum(self._link_bytes.get(b) or int(b.param_data.nbytes) for b in buckets)

    def tell(self) -> None:
        """Log at the end of a run how many bits were gathered of a parameter."""
        if self._coded_values:
            log_single_rank(
                logger,
                logging.INFO,
                "parameters were gathered in %.2f of 16 bits, padding included",
                self._coded_bits / self._coded_values,
            )

    def _coded(self, optimizer: Any) -> Iterator[Any]:
        """Yield the buckets that this step of an optimizer can code; forget what it coded before.

        A step that is taken in parts gathers them itself, and a segment that every replica steps
        is not gathered at all.
        """
        if not hasattr(optimizer, "shard_fp32_groups") or optimizer.is_stub_optimizer:
            return
        own = {bucket for buffer in optimizer.buffers for bucket in buffer.buckets}
        is_whole = (
            optimizer.data_parallel_group.size() == 1
            or not self._is_faster.get(optimizer, True)
            or getattr(optimizer, "_defer_param_sync", False)
        )
        for group in bucket_groups(*optimizer.model_chunks):
            for bucket in group.buckets:
                if bucket not in own:
                    continue
                self._messages.pop(bucket, None)
                self._link_bytes.pop(bucket, None)
                if is_whole or group.param_gather_dispatched or bucket.param_data is None:
                    continue
                if bucket.param_data.dtype in MANTISSAS:
                    yield bucket

    def _warn_of_drift(self, sums: Sequence[Sequence[int]], replicas: Any) -> None:
        """Name the replicas whose checksums, by replica and bucket, are not those of the others."""
        of_buckets = [list(of_bucket) for of_bucket in zip(*sums, strict=True)]
        usual = [max(of_bucket, key=of_bucket.count) for of_bucket in of_buckets]
        ranks = ranks_of(replicas)
        odd = [rank for rank, its in zip(ranks, sums, strict=True) if [*its] != usual]
        logger.warning(
            "--delta-param-gather: before this step %s held other parameters than its replicas; "
            "%d of %d buckets are gathered whole, which makes them equal again",
            f"ranks {odd}" if len(ranks) > 2 else f"one of ranks {[*ranks]}",
            sum(len({*of_bucket}) > 1 for of_bucket in of_buckets),
            len(of_buckets),
        )

    def _measure(
        self, optimizer: Any, buckets: Sequence[Any], olds: Sequence[torch.Tensor], coding_s: float
    ) -> None:
        """Decide if coding is faster; the replicas decide together.

        Args:
            olds: of each bucket, the own shard before the step; decoded here.
            coding_s: the seconds of encoding all of them.
        """
        replicas, device = optimizer.data_parallel_group, olds[0].device
        shards = dict(zip(buckets, olds, strict=True))
        coded = [bucket for bucket in buckets if bucket in self._messages]
        passed_s = clock(device)
        for bucket in coded:
            message = self._messages[bucket]
            decode(torch.cat([message, message.new_zeros(SPARE_WORDS)]), shards[bucket])
        coding_s += passed_s() * (replicas.size() - 1)
        whole_bytes = min(sum(bucket.param_data.nbytes for bucket in buckets), _TIMED_BYTES)
        shard = torch.zeros(whole_bytes // replicas.size(), dtype=torch.uint8, device=device)
        whole = shard.repeat(replicas.size())

        def gather() -> None:
            dist.all_gather_into_tensor(whole, shard, group=replicas)

        whole_s = seconds(gather, device, 1, warm_up=1)
        saved = sum(bucket.param_data.nbytes - self._link_bytes[bucket] for bucket in coded)
        saved_s = saved * whole_s / whole.nbytes
        is_faster = all(gathered(saved_s > WORTH * coding_s, replicas))
        self._is_faster[optimizer] = is_faster
        if not is_faster:
            for bucket in coded:
                del self._messages[bucket], self._link_bytes[bucket]
        log_single_rank(
            logger,
            logging.INFO,
            "--delta-param-gather auto: coding saves %.3g s of all-gathers an iteration and takes "
            "%.3g s, so it is %s",
            *(saved_s, coding_s, "on" if is_faster else "off"),
        )


class _Gather:
    """The all-gathers of a bucket group in flight.

    Args:
        messages: of each bucket, this replica's message, as long as all others' are; None gathers
            the bucket whole.
    """

    def __init__(self, group: Any, messages: Sequence[torch.Tensor | None]) -> None:
        self._replicas = group_of(group)
        self.works: list[Any] = []
        self._received: list[tuple[torch.Tensor, torch.Tensor]] = []  # messages, and parameters
        for bucket, message in zip(group.buckets, messages, strict=True):
            whole = bucket.param_data.detach()
            own = _own_shard(bucket, self._replicas)
            if message is not None:
                size = message.numel()
                memory = message.new_empty(self._replicas.size() * size + SPARE_WORDS)
                whole, values = memory[:-SPARE_WORDS], whole
                own = whole[self._replicas.rank() * size :][:size].copy_(message)
                self._received.append((whole, values))
            self.works.append(
                dist.all_gather_into_tensor(whole, own, group=self._replicas, async_op=True)
            )

    @torch.no_grad()
    def wait(self) -> None:
        """Let the current stream wait for all messages, and decode them in place."""
        for work in self.works:
            work.wait()
        size = self._replicas.size()
        for messages, values in self._received:
            parts = zip(messages.chunk(size), values.chunk(size), strict=True)
            for rank, (message, shard) in enumerate(parts):
                if rank != self._replicas.rank():
                    decode(message, shard)
        self.works, self._received = [], []


def _own_shard(bucket: Any, replicas: Any) -> torch.Tensor:
    shard: torch.Tensor = bucket.param_data.detach().chunk(replicas.size())[replicas.rank()]
    return shard

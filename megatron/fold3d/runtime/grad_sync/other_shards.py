"""``optimizer=replicated``: segments that every replica steps in full.

Their gradients are all-reduced during the backward, and their forward needs no all-gather. So bytes
move from the forward, which is often too short for the all-gathers of all segments, to the
backward. This does not depend on the gradient norm, so it also works in a step that is clipped.

    segment 1 is replicated

    compute    .. 2F 2B     1B        0B        │ norm, steps │ 0F        1F        2F
    DP.sync             2rs ─── 1ar ────── 0rs ─│             │─ 0ag ─ 2ag ─

Megatron's distributed optimizer steps one shard of each bucket per replica. Inside `widened`, the
shards of the other replicas are appended to its lists. So Megatron itself unscales, clips and steps
them, and writes the parameters:

    a bucket on replica 1 of 2      shard 0            shard 1
    Megatron's lists                                   its parameters and moments
    inside `widened`                copies of them     its parameters and moments

The gradients of the whole bucket must have been all-reduced. Every replica then computes the same
bits, so no all-gather is needed.

Keeps two invariants. Outside of `widened` the optimizer is as Megatron made it, so its checkpoints
do not change. Between two steps a replicated segment's parameters are whole on every replica.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import Range
from megatron.core.optimizer.optimizer import copy_optimizer_param_metadata
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes

from megatron.fold3d.runtime.feature import Feature, Iteration
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups
from megatron.fold3d.runtime.grad_sync.partial_step import side_by_side

Key = tuple[int, int, int]
"""Indices of a parameter: the buffer in the optimizer, then bucket and parameter in the buffer."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """The metadata that a replica sends of its shards; the tensors are gathered by bucket.

    Attributes:
        groups: by parameter, the index of its group in the optimizer.
        scalars: by parameter, the optimizer state other than tensors of the shard's size; each
            value with whether it is on the device.
        tensors: by name, the dtypes of the state that has the shard's size.
        steps: by group, the step count of a fused optimizer.
    """

    groups: dict[Key, int]
    scalars: dict[Key, dict[str, tuple[Any, bool]]]
    tensors: dict[str, torch.dtype]
    steps: list[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shard:
    """A part of a parameter that one replica's optimizer steps.

    Attributes:
        key: the parameter's key.
        parameter: the whole parameter.
        ranges: Megatron's ranges of the part: in the parameter, the bucket and the replica's shard.
        rank: the replica that owns it.
    """

    key: Key
    parameter: Any
    ranges: Mapping[str, Range]
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Copy:
    """The entry in Megatron's lists for a shard of another replica.

    Attributes:
        of: the shard.
        group: the index of its group.
        name: a tensor that replaces the parameter as a key of Megatron's maps, which hold one shard
            per parameter.
        model: 1-D view of the parameter.
        stepped: the tensor that the optimizer steps: ``model``, or its fp32 copy for 16 bits.
        state: the optimizer's state of the shard, kept here outside of `widened`.
    """

    of: _Shard
    group: int
    name: Any
    model: torch.Tensor
    stepped: torch.Tensor
    state: dict[str, Any] = field(default_factory=dict)


_MEGATRONS = "megatron.core.distributed.param_and_grad_buffer"


class ReplicatedSegments(Feature):
    """The segments of one rank that every replica steps in full.

    Args:
        segments: these segments; `choose` may change them.
    """

    def __init__(self, segments: Collection[int]) -> None:
        self._chosen = frozenset(segments)
        self._replicated: frozenset[int] = frozenset()  # in the latest training iteration
        self._whole: frozenset[int] | None = None  # behind the latest step; None is before any
        self._chunks: Sequence[Any] = ()
        self._others: Sequence[OtherShards] | None = None
        logging.getLogger(_MEGATRONS).addFilter(_is_news)

    def choose(self, segments: Collection[int]) -> None:
        """From the next training iteration on, step these segments in full."""
        self._chosen = frozenset(segments)

    def prepare(self, iteration: Iteration) -> None:
        """In training, all-reduce these segments' gradients, and gather nothing."""
        if not iteration.trains:
            return
        chunks: Sequence[Any] = iteration.chunks
        self._chunks = chunks
        if self._replicated != self._chosen:
            self._replicated, self._others = self._chosen, None
        for segment in self._replicated:
            chunks[segment].force_all_reduce = True  # Megatron resets it behind each iteration
            if self._whole is None or segment in self._whole:
                for bucket_group in bucket_groups(chunks[segment]):
                    bucket_group.param_gather_dispatched = True  # so that no hook starts it

    @contextmanager
    def widened(self, optimizer: Any) -> Iterator[None]:
        """Let Megatron's ``ChainedOptimizer`` step these segments in full, inside the block.

        All ranks of the job enter it together.
        """
        if self._others is None:
            chunks = [self._chunks[segment] for segment in sorted(self._replicated)]
            self._others = [
                OtherShards(part, chunks)
                for part in (optimizer.chained_optimizers if chunks else ())
                if not part.is_stub_optimizer
            ]
        with ExitStack() as stack:
            for others in self._others:
                stack.enter_context(others.widened())
            yield
        self._whole = self._replicated


def _is_news(record: logging.LogRecord) -> bool:
    """Drop the line that Megatron logs for each all-reduce with the distributed optimizer."""
    return "because force_all_reduce=True" not in record.getMessage()


class OtherShards:
    """The other replicas' shards of one optimizer's parameters in some model chunks.

    All replicas construct it together, between two steps, when all parameters are whole.

    Args:
        part: Megatron's ``DistributedOptimizer``.
        chunks: the model chunks.
    """

    def __init__(self, part: Any, chunks: Collection[Any]) -> None:
        self._part = part
        self._replicas = part.data_parallel_group
        self._size, self._rank = self._replicas.size(), self._replicas.rank()
        buffers = [b for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
        self._buckets = [
            (index, number)
            for index, buffer in enumerate(part.buffers)
            if any(buffer is ours for ours in buffers)
            for number in range(len(buffer.buckets))
        ]
        self._own: dict[Any, torch.Tensor] = {  # by parameter, what the optimizer steps here
            parameter: made[-1]
            for of_group in side_by_side(part)
            for parameter, *made in zip(*of_group, strict=True)
        }
        shards = [shard for bucket in self._buckets for shard in self._shards(*bucket)]
        facts: list[Any] = [None] * self._size
        dist.all_gather_object(facts, self._facts(shards), group=self._replicas)
        self._copies = [
            self._copy(shard, facts[shard.rank]) for shard in shards if shard.rank != self._rank
        ]
        # A fused optimizer counts no step of a group that is empty on this rank.
        self._steps = [
            max((s for s in steps if s is not None), default=None)
            for steps in zip(*(each.steps for each in facts), strict=True)
        ]
        dtypes = {name: dtype for each in facts for name, dtype in each.tensors.items()}
        for bucket in self._buckets:
            self._fill(bucket, shards, dtypes)

    @contextmanager
    def widened(self) -> Iterator[None]:
        """Let the optimizer step these shards too, inside the block."""
        part, groups = self._part, self._part.optimizer.param_groups
        lists = [*chain.from_iterable(side_by_side(part)), *(group["params"] for group in groups)]
        lengths = list(map(len, lists))
        alone = [number for number, group in enumerate(groups) if not group["params"]]
        own_steps = {number: groups[number].get("step") for number in alone}
        for number in alone:
            _set_step(groups[number], self._steps[number])
        try:
            for copy in self._copies:
                self._add(copy)
            yield
        finally:
            for entries, length in zip(lists, lengths, strict=True):
                del entries[length:]
            for number in alone:
                self._steps[number] = groups[number].get("step")
                _set_step(groups[number], own_steps[number])
            for copy in self._copies:
                self._remove(copy)

    def _add(self, copy: _Copy) -> None:
        part, group = self._part, copy.group
        index, number, _ = copy.of.key
        copy.name.main_grad = copy.of.parameter.main_grad
        (dtype,) = part.gbuf_ranges[index]
        part.model_param_gbuf_map[copy.name] = (index, dtype, number)
        part.gbuf_ranges[index][dtype][number]["param_map"][copy.name] = copy.of.ranges
        part.optimizer.param_groups[group]["params"].append(copy.stepped)
        if copy.stepped is copy.model:
            part.model_fp32_groups[group].append(copy.name)
            part.shard_fp32_groups[group].append(copy.stepped)
        else:
            part.model_float16_groups[group].append(copy.name)
            part.shard_float16_groups[group].append(copy.model)
            part.shard_fp32_from_float16_groups[group].append(copy.stepped)
        if copy.state:
            part.optimizer.state[copy.stepped] = dict(copy.state)

    def _remove(self, copy: _Copy) -> None:
        index, number, _ = copy.of.key
        part = self._part
        (dtype,) = part.gbuf_ranges[index]
        part.model_param_gbuf_map.pop(copy.name, None)
        part.gbuf_ranges[index][dtype][number]["param_map"].pop(copy.name, None)
        copy.state.update(part.optimizer.state.pop(copy.stepped, {}))
        copy.stepped.grad = None

    def _shards(self, index: int, number: int) -> Iterator[_Shard]:
        """Yield all replicas' shards of one bucket."""
        buffer = self._part.buffers[index]
        bucket = buffer.buckets[number]
        size = bucket.grad_data.numel() // self._size
        positions = {p: position for position, p in enumerate(buffer.param_index_map)}
        for rank in range(self._size):
            begin = bucket.offset + rank * size
            ranges = self._part._build_model_gbuf_param_range_map(
                buffer.param_index_map, Range(begin, begin + size), bucket.offset
            )
            for parameter, of_parameter in ranges.items():
                key = index, number, positions[parameter]
                yield _Shard(key=key, parameter=parameter, ranges=of_parameter, rank=rank)

    def _facts(self, shards: Sequence[_Shard]) -> _Facts:
        groups: dict[Key, int] = {}
        scalars: dict[Key, dict[str, tuple[Any, bool]]] = {}
        tensors: dict[str, torch.dtype] = {}
        for shard in (shard for shard in shards if shard.rank == self._rank):
            stepped = self._own[shard.parameter]
            groups[shard.key] = self._part.model_param_group_index_map[shard.parameter][0]
            scalars[shard.key] = {}
            for name, value in self._part.optimizer.state.get(stepped, {}).items():
                if _is_of_shard(value, stepped):
                    tensors[name] = value.dtype
                else:
                    on_device = isinstance(value, torch.Tensor) and value.device == stepped.device
                    value = value.cpu() if isinstance(value, torch.Tensor) else value
                    scalars[shard.key][name] = value, on_device
        steps = [group.get("step") for group in self._part.optimizer.param_groups]
        return _Facts(groups, scalars, tensors, steps)

    def _copy(self, shard: _Shard, facts: _Facts) -> _Copy:
        parameter, part_of_it = shard.parameter, shard.ranges["param"]
        model = parameter.detach().view(-1)[part_of_it.start : part_of_it.end]
        stepped = model.float()  # the same where it is fp32 already
        copy_tensor_model_parallel_attributes(stepped, parameter)
        copy_optimizer_param_metadata(stepped, parameter)
        stepped.shared = True  # a norm counts it on the replica that owns it
        copy = _Copy(
            of=shard,
            group=facts.groups[shard.key],
            name=parameter.detach(),
            model=model,
            stepped=stepped,
        )
        for name, (value, on_device) in facts.scalars[shard.key].items():
            copy.state[name] = value.to(stepped.device) if on_device else value
        return copy

    def _fill(
        self, bucket: tuple[int, int], shards: Sequence[_Shard], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """Gather the state of one bucket's shards from their owners, one kind at a time."""
        here = self._part.buffers[bucket[0]].buckets[bucket[1]]
        size = here.grad_data.numel() // self._size
        mine = [s for s in shards if s.key[:2] == bucket and s.rank == self._rank]
        copies = [copy for copy in self._copies if copy.of.key[:2] == bucket]

        def gathered(dtype: torch.dtype, of: Callable[[torch.Tensor], Any]) -> torch.Tensor:
            own = torch.zeros(size, dtype=dtype, device=here.grad_data.device)
            for shard in mine:
                local = shard.ranges["gbuf_local"]
                if (value := of(self._own[shard.parameter])) is not None:
                    own[local.start : local.end].copy_(value.detach().view(-1))
            whole = torch.empty(size * self._size, dtype=dtype, device=own.device)
            dist.all_gather_into_tensor(whole, own, group=self._replicas)
            return whole

        def part_of(whole: torch.Tensor, copy: _Copy) -> torch.Tensor:
            local = copy.of.ranges["gbuf_local"]
            return whole[copy.of.rank * size :][local.start : local.end]

        state = self._part.optimizer.state
        if here.param_data.dtype != torch.float32:
            whole = gathered(torch.float32, lambda stepped: stepped)
            for copy in copies:
                copy.stepped.copy_(part_of(whole, copy))
        for name in sorted(dtypes):
            values = {stepped: of_it.get(name) for stepped, of_it in state.items()}
            whole = gathered(dtypes[name], values.get)
            for copy in copies:
                copy.state[name] = part_of(whole, copy).clone()


def _is_of_shard(value: Any, stepped: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == stepped.numel()


def _set_step(group: dict[str, Any], step: Any) -> None:
    if step is None:
        group.pop("step", None)
    else:
        group["step"] = step

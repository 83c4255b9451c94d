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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import Range
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes

from megatron.fold3d.plan.ir import Op
from megatron.fold3d.runtime.agreement import gathered
from megatron.fold3d.runtime.feature import Feature, Iteration
from megatron.fold3d.runtime.grad_sync.bucket_groups import bucket_groups
from megatron.fold3d.runtime.grad_sync.partial_step import side_by_side
from megatron.fold3d.upstream.versions import copy_optimizer_param_metadata

Key = tuple[int, int, int]
"""Indices of a parameter: the buffer in the optimizer, then bucket and parameter in the buffer."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a replica tells of one of its shards, before it broadcasts the shard's tensors.

    Attributes:
        group: the index of the parameter's group in the optimizer.
        scalars: the optimizer state other than tensors of the shard's size; each value with
            whether it is on the device.
        tensors: by name, the dtypes of the state that has the shard's size.
    """

    group: int
    scalars: dict[str, tuple[Any, bool]]
    tensors: dict[str, torch.dtype]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shard:
    """A part of a parameter that one replica's optimizer steps.

    Attributes:
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
    state: dict[str, Any]


_MEGATRONS = "megatron.core.distributed.param_and_grad_buffer"


class ReplicatedSegments(Feature):
    """The segments of one rank that every replica steps in full: those that a plan all-reduces."""

    def __init__(self) -> None:
        self._replicated: frozenset[int] = frozenset()  # in the latest training iteration
        self._whole: frozenset[int] | None = None  # behind the latest step; None is before any
        self._chunks: Sequence[Any] = ()
        self._others: Sequence[OtherShards] | None = None
        logging.getLogger(_MEGATRONS).addFilter(_is_news)

    def prepare(self, iteration: Iteration) -> None:
        """Gather nothing of the segments whose gradients the plan all-reduces."""
        self._chunks = iteration.chunks
        summed = [action for action in iteration.program if action.op is Op.ALL_REDUCE]
        if self._replicated != (found := frozenset(map(iteration.segment, summed))):
            self._replicated, self._others = found, None
        self._gather_nothing(self._replicated if self._whole is None else found & self._whole)

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
            self._gather_nothing(self._replicated)
            yield
        self._whole = self._replicated

    def _gather_nothing(self, segments: Iterable[int]) -> None:
        """Let no hook start the all-gathers of segments, and nothing be coded for them."""
        for bucket_group in bucket_groups(*(self._chunks[segment] for segment in segments)):
            bucket_group.param_gather_dispatched = True


def _is_news(record: logging.LogRecord) -> bool:
    """Drop the line that Megatron logs for each all-reduce with the distributed optimizer."""
    return "because force_all_reduce=True" not in record.getMessage()


class OtherShards:
    """The other replicas' shards of one optimizer's parameters in some model chunks.

    All replicas construct it together, between two steps, when all parameters are whole.

    Args:
        part: Megatron's ``DistributedOptimizer``.
    """

    def __init__(self, part: Any, chunks: Collection[Any]) -> None:
        self._part = part
        self._replicas = part.data_parallel_group
        self._rank = self._replicas.rank()
        buffers = [b for c in chunks for b in (*c.buffers, *c.expert_parallel_buffers)]
        shards = [
            shard
            for index, buffer in enumerate(part.buffers)
            if any(buffer is ours for ours in buffers)
            for number in range(len(buffer.buckets))
            for shard in self._shards(index, number)
        ]
        self._own: dict[Any, torch.Tensor] = {  # by parameter, what the optimizer steps here
            parameter: made[-1]
            for of_group in side_by_side(part)
            for parameter, *made in zip(*of_group, strict=True)
        }
        told = {s.key: self._facts(s.parameter) for s in shards if s.rank == self._rank}
        steps = [group.get("step") for group in part.optimizer.param_groups]
        everyones = gathered((told, steps), self._replicas)
        copies = (self._shared(shard, everyones[shard.rank][0][shard.key]) for shard in shards)
        self._copies = [copy for copy in copies if copy is not None]
        # A fused optimizer counts no step of a group that is empty on this rank.
        self._steps = [
            max((s for s in of_ranks if s is not None), default=None)
            for of_ranks in zip(*(steps for _, steps in everyones), strict=True)
        ]

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
        num_replicas = self._replicas.size()
        size = bucket.grad_data.numel() // num_replicas
        positions = {p: position for position, p in enumerate(buffer.param_index_map)}
        for rank in range(num_replicas):
            begin = bucket.offset + rank * size
            ranges = self._part._build_model_gbuf_param_range_map(
                buffer.param_index_map, Range(begin, begin + size), bucket.offset
            )
            for parameter, of_parameter in ranges.items():
                key = index, number, positions[parameter]
                yield _Shard(key=key, parameter=parameter, ranges=of_parameter, rank=rank)

    def _facts(self, parameter: Any) -> _Facts:
        stepped = self._own[parameter]
        scalars: dict[str, tuple[Any, bool]] = {}
        tensors: dict[str, torch.dtype] = {}
        for name, value in sorted(self._part.optimizer.state.get(stepped, {}).items()):
            if not isinstance(value, torch.Tensor):
                scalars[name] = value, False
            elif value.dim() > 0 and value.numel() == stepped.numel():
                tensors[name] = value.dtype
            else:
                scalars[name] = value.cpu(), value.device == stepped.device
        return _Facts(self._part.model_param_group_index_map[parameter][0], scalars, tensors)

    def _shared(self, shard: _Shard, facts: _Facts) -> _Copy | None:
        """Broadcast a shard from its owner, together; return the copy that another replica has."""
        parameter, part_of_it = shard.parameter, shard.ranges["param"]
        model = parameter.detach().view(-1)[part_of_it.start : part_of_it.end]
        stepped: Any
        if is_own := shard.rank == self._rank:
            stepped = self._own[parameter]
            state = {name: self._part.optimizer.state[stepped][name] for name in facts.tensors}
        else:
            stepped = model.float()  # the same where it is fp32 already
            state = {name: torch.empty_like(model, dtype=d) for name, d in facts.tensors.items()}
        # Each replica has the whole of an fp32 parameter, which is what is stepped.
        masters = () if parameter.dtype == torch.float32 else (stepped,)
        for tensor in (*masters, *state.values()):
            dist.broadcast(tensor.detach(), group=self._replicas, group_src=shard.rank)
        if is_own:
            return None
        copy_tensor_model_parallel_attributes(stepped, parameter)
        copy_optimizer_param_metadata(stepped, parameter)
        stepped.shared = True  # a norm counts it on the replica that owns it
        for name, (value, on_device) in facts.scalars.items():
            state[name] = value.to(stepped.device) if on_device else value
        return _Copy(
            of=shard,
            group=facts.group,
            name=parameter.detach(),
            model=model,
            stepped=stepped,
            state=state,
        )


def _set_step(group: dict[str, Any], step: Any) -> None:
    if step is None:
        group.pop("step", None)
    else:
        group["step"] = step

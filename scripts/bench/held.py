"""Counts the activations that a rank holds while it trains under a plan, beside the verifier's.

Counted are tensors that autograd has saved for a backward, and operands of delayed weight gradients
for as long as anything keeps them, whatever the runtime says of them. A micro-batch is held from
its forward to its backward, or to its weight gradients where these are delayed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.plan.ops import COMPUTE_OPS, PART_OPS, TABLE, WEIGHT_OPS
from megatron.fold3d.plan.passes.place_weight_grads import HeldSizes
from megatron.fold3d.plan.passes.weight_grads import split_stages
from megatron.fold3d.runtime import executor
from megatron.fold3d.runtime.feature import Feature, Handler, Handlers, Iteration
from megatron.fold3d.runtime.measure.saved_bytes import SavedBytes
from megatron.fold3d.runtime.weight_grads.delayed_linear import DelayedWeightGrads

_OPS = frozenset(op for op in COMPUTE_OPS - PART_OPS if TABLE[op].kind != "recompute")


@dataclass(slots=True)
class Held:
    """Of the last training iteration.

    Attributes:
        rank: of the pipeline.
        most: micro-batches, and bytes, at the fullest time between two actions.
        predicted: of both, what the plan says; bytes by those of one micro-batch in each stage.
    """

    rank: int = 0
    most: tuple[int, int] = (0, 0)
    predicted: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        (count, num_bytes), (most, most_bytes) = self.most, self.predicted
        return f"rank {self.rank} held {count} of {most} micro-batches, {num_bytes} of {most_bytes}"


@contextmanager
def counted() -> Iterator[Held]:
    """Count in this block; what is yielded is up to date at the end of each iteration."""
    found, make_table, keep = Held(), executor._table, DelayedWeightGrads._keep
    meter: SavedBytes | None = None

    def table(
        features: Sequence[Feature], iteration: Iteration, innermost: Handlers
    ) -> dict[Op, Handler]:
        nonlocal meter
        handlers = dict(make_table(features, iteration, innermost))
        if iteration.trains:
            meter = SavedBytes(iteration.chunks)
            count = _Count(iteration, meter, found)
            handlers |= {op: count.watched(handlers[op]) for op in _OPS}
            iteration.ends.callback(count.end)
        return handlers

    def keep_counted(self: Any, weight: Any, bias: Any, parallel: Any, *tensors: Any) -> None:
        keep(self, weight, bias, parallel, *tensors)
        for tensor in tensors:
            tensor.counts = meter._pack(tensor)  # type: ignore[union-attr]  # as long as it lives

    executor._table, DelayedWeightGrads._keep = table, keep_counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        executor._table, DelayedWeightGrads._keep = make_table, keep  # type: ignore[method-assign]


@dataclass(slots=True)
class _Count:
    """One iteration."""

    iteration: Iteration
    meter: SavedBytes
    found: Held
    micro_batches: int = 0
    most: tuple[int, int] = (0, 0)
    grown: dict[tuple[int, str], int] = field(default_factory=dict)
    """Bytes that the first action of a stage and a kind has added."""

    def watched(self, act: Handler) -> Handler:
        split = split_stages(self.iteration.program)

        def run(action: Action) -> None:
            before = self.meter.now
            with self.meter.hooks():
                act(action)
            kind = TABLE[action.op].kind
            self.grown.setdefault((action.stage, kind), self.meter.now - before)
            if kind == "forward":
                self.micro_batches += 1
            elif action.op in WEIGHT_OPS or (kind == "backward" and action.stage not in split):
                self.micro_batches -= 1
            count, num_bytes = self.most
            self.most = max(count, self.micro_batches), max(num_bytes, self.meter.now)

        return run

    def end(self) -> None:
        """Report, and say what the plan predicts for bytes like these."""
        plan, rank = self.iteration.plan, self.iteration.rank

        def of(stage: int, *kinds: str) -> float:
            return float(sum(self.grown.get((stage, kind), 0) for kind in kinds))

        stages = range(plan.num_stages)
        sizes = HeldSizes(
            saved=tuple(of(stage, "forward") for stage in stages),
            delayed=tuple(of(stage, "forward", "backward") for stage in stages),
            most=(0.0,) * plan.num_ranks,
        )
        self.found.rank, self.found.most = rank, self.most
        self.found.predicted = peak_activations(plan)[rank], int(sizes.peaks(plan)[rank])

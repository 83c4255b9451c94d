"""Counts what parameters and gradients a rank holds, while it trains under a plan.

Every action may change it; the optimizer's step, for which all is whole again, does not count.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.runtime import executor
from megatron.fold3d.runtime.feature import Feature, Handler, Handlers, Iteration
from megatron.fold3d.runtime.shard_buffers import Data, ShardBuffers


@dataclass(slots=True)
class Resident:
    """Bytes of parameters and of gradients: all of the rank's, and the most at once.

    Attributes:
        whole: of both, as Megatron holds them.
        most: of both, the most that a training iteration held.
    """

    whole: tuple[int, int] = (0, 0)
    most: tuple[int, int] = (0, 0)


@contextmanager
def counted() -> Iterator[Resident]:
    """Count in this block; what is yielded is up to date at its end."""
    found, make_table = Resident(), executor._table

    def table(
        features: Sequence[Feature], iteration: Iteration, innermost: Handlers
    ) -> dict[Op, Handler]:
        handlers = dict(make_table(features, iteration, innermost))
        if not iteration.trains:
            return handlers
        chunks: Sequence[Any] = iteration.chunks
        buffers = [buffer for chunk in chunks for buffer in chunk.buffers]
        kinds = [b.param_data for b in buffers], [b.grad_data for b in buffers]
        found.whole = _sum(kinds, lambda b: b.nbytes)
        kept = [_kept(features, "param_data"), _kept(features, "grad_data")]

        def watched(act: Handler) -> Handler:
            def run(action: Action) -> None:
                act(action)
                now = _sum(kinds, lambda b: b.untyped_storage().size())
                shards = _sum([_shards(k) for k in kept], lambda shard: shard.nbytes)
                parameters, gradients = (a + b for a, b in zip(now, shards, strict=True))
                found.most = max(found.most[0], parameters), max(found.most[1], gradients)

            return run

        return {op: watched(act) for op, act in handlers.items()}

    executor._table = table
    try:
        yield found
    finally:
        executor._table = make_table


def _kept(features: Sequence[Feature], data: Data) -> dict[int, list[Any]]:
    """Return the shards, by segment, of the feature that frees these; none if it is off."""
    of_data = (f._kept for f in features if isinstance(f, ShardBuffers) and f.data == data)
    return next(of_data, {})


def _shards(kept: dict[int, list[Any]]) -> list[Any]:
    return [shard for shards in kept.values() for shard in shards]


def _sum(kinds: Sequence[Sequence[Any]], size: Callable[[Any], int]) -> tuple[int, int]:
    parameters, gradients = (sum(map(size, kind)) for kind in kinds)
    return parameters, gradients

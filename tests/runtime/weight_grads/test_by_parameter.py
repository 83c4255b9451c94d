import weakref
from collections.abc import Iterable
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.fold3d.plan.ir import WHOLE, Action
from megatron.fold3d.runtime.weight_grads.by_parameter import SplitBackwards, in_parts

LAYER = {"fc2": 4, "fc1": 4, "qkv": 3, "proj": 1}
Item = tuple[str, int]


def divided(sizes: dict[str, int], microbatches: int, parts: int) -> list[list[tuple[Item, bool]]]:
    of_owners = [[(name, m) for m in range(microbatches)] for name in sizes]
    return in_parts(of_owners, [*sizes.values()], [(1,)] * len(sizes), ends(parts))


def ends(parts: int) -> list[int]:
    return [WHOLE * (i + 1) // parts for i in range(parts)]


def test_small_parameters_are_complete_first():
    complete = [[name for (name, _), is_last in part if is_last] for part in divided(LAYER, 8, 8)]
    assert complete == [["proj"], [], ["qkv"], [], [], ["fc2"], [], ["fc1"]]


def test_shards_are_complete_in_turns():
    # Of two shards fc2 and a half of fc1 are the first, and the others the second.
    shards = [(4, 0), (2, 2), (0, 3), (0, 1)]
    parts = in_parts([[name] for name in LAYER], [*LAYER.values()], shards, ends(12))
    assert [name for part in parts for name, _ in part] == ["proj", "fc2", "qkv", "fc1"]


class Operand:
    """The work on one weight in one micro-batch."""


class OneWeight(SplitBackwards[Operand]):
    """Two micro-batches of a model chunk with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self._kept = {(0, 0): [Operand()], (0, 1): [Operand()]}

    def choose(self, chunks: Any) -> None:
        pass

    def keeping(self, backward: Action) -> Any:
        raise NotImplementedError

    def _parameters(self, item: Operand) -> list[torch.Tensor]:
        return [self.weight]

    def _add(self, items: Iterable[Operand]) -> None:
        assert len([*items]) == 1


def test_what_a_part_needs_is_free_once_it_is_computed():
    chunk: Any = SimpleNamespace(bucket_groups=(), expert_parallel_bucket_groups=())
    program = tuple(map(Action.from_str, ("0B0", "0B1", "0W:500", "0W:1000")))
    plan, unfinished = SimpleNamespace(num_ranks=1), dict[int, set[torch.Tensor]]()
    split = OneWeight()
    iteration: Any = SimpleNamespace(
        program=program, plan=plan, chunks=[chunk], unfinished=unfinished
    )
    split.prepare(iteration)
    first, second = map(weakref.ref, chain.from_iterable(split._kept.values()))
    split.compute_part(program[2])
    assert first() is None
    assert second() is not None
    assert unfinished == {0: {split.weight}}
    split.compute_part(program[3])
    assert second() is None
    assert unfinished == {0: set()}


@given(
    st.dictionaries(st.text(min_size=1), st.integers(1, 50), min_size=1),
    st.integers(1, 8),
    st.integers(1, 8),
)
def test_each_item_is_in_one_part_and_parts_take_equally_long(
    sizes: dict[str, int], microbatches: int, num_parts: int
):
    parts = divided(sizes, microbatches, num_parts)
    assert len(parts) == num_parts
    items = [item for item, _ in chain.from_iterable(parts)]
    for name in sizes:
        assert [m for n, m in items if n == name] == [*range(microbatches)]
    lasts = [item for item, is_last in chain.from_iterable(parts) if is_last]
    assert sorted(lasts) == sorted((name, microbatches - 1) for name in sizes)
    whole, done = sum(sizes.values()) * microbatches, 0
    for number, part in enumerate(parts, 1):
        done += sum(sizes[name] for (name, _), _ in part)
        end = ends(num_parts)[number - 1]
        assert done * WHOLE // whole <= end  # no part takes more than its share so far
        assert end < (done + max(sizes.values())) * WHOLE // whole or done == whole

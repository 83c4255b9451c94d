"""Each transformer block of a rank recomputes the number of layers of its stage."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_block import TransformerBlock

from megatron.fold3d.runtime.recompute_counts import RecomputeCounts

SHARED = SimpleNamespace(recompute_num_layers=2)


def chunk(num_layers: int) -> torch.nn.Module:
    """A model chunk whose transformer block has layers and a configuration, and nothing else."""
    block = TransformerBlock.__new__(TransformerBlock)
    torch.nn.Module.__init__(block)
    block.config = SHARED
    block.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(num_layers))
    return torch.nn.Sequential(block)


def prepare(counts: tuple[int, ...], rank: int, chunks: list[torch.nn.Module]) -> list[Any]:
    """What `RecomputeCounts` asks of an iteration: two ranks."""
    plan = SimpleNamespace(num_ranks=2)
    iteration: Any = SimpleNamespace(chunks=chunks, rank=rank, plan=plan)
    feature = RecomputeCounts(counts)
    feature.prepare(iteration)
    feature.prepare(iteration)  # of the next iteration: nothing is left to do
    return [block.config for model in chunks for block in model]


def test_a_segment_has_the_number_of_its_stage():
    configs = prepare((0, 2, 1, 3), 1, [chunk(2), chunk(3)])
    assert [config.recompute_num_layers for config in configs] == [2, 3]
    assert SHARED.recompute_num_layers == 2  # the rest of the model keeps what it had


def test_more_layers_than_a_stage_has_are_refused():
    with pytest.raises(ValueError, match=r"3 layers of stage 2 .* it has 2; give at most as many"):
        prepare((0, 0, 3, 0), 0, [chunk(2), chunk(2)])

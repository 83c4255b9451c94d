"""Reading data must not move the generator that dropout draws from."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from fold3d_patches.cpu import data_loader


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.processes)])
def test_iterating_leaves_the_default_generator_alone(num_workers: int) -> None:
    def upstream(dataset: Any, consumed_samples: int) -> Any:
        return DataLoader(dataset, num_workers=num_workers)

    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader = data_loader.PATCHES[0].make(upstream)([1, 2], 0)
    assert [int(batch) for _ in range(2) for batch in loader] == [1, 2, 1, 2]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_dataset_without_a_loader_passes_through_the_patch() -> None:
    made = data_loader.PATCHES[0].make(lambda dataset, consumed_samples: dataset)
    assert (made(None, 0), made("external", 0)) == (None, "external")

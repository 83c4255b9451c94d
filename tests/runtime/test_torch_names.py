"""Process groups of ours answer to the names of every torch that may be installed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.fold3d.runtime.preemption.preemptive_group import PreemptiveGroup
from megatron.fold3d.runtime.tensor_parallel.paired_group import PairedGroup
from megatron.fold3d.runtime.torch_names import method_of

SINGLE = {"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base"}
COALESCED = {
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


@pytest.mark.parametrize(
    ("group", "names"),
    [(PairedGroup, SINGLE), (PreemptiveGroup, SINGLE | COALESCED)],
)
def test_collectives_have_the_names_of_older_torch_too(group: type, names: dict[str, str]):
    for name, older in names.items():
        assert vars(group)[older] is vars(group)[name]


class OlderGroup:
    """As a group of torch 2.8, which has the older names alone."""

    def _allgather_base(self, whole: torch.Tensor, share: torch.Tensor, options: Any) -> str:
        return f"gathered {len(share)} into {len(whole)}"

    def _reduce_scatter_base(self, share: torch.Tensor, whole: torch.Tensor, options: Any) -> str:
        return f"reduced {len(whole)} into {len(share)}"


def test_a_group_that_has_the_older_names_alone_is_called_by_them():
    whole, share = torch.empty(4), torch.empty(2)
    group: Any = OlderGroup()
    paired: Any = SimpleNamespace(_start=lambda name, *given: method_of(group, name)(*given))
    assert PairedGroup._allgather_base(paired, whole, share, None) == "gathered 2 into 4"
    assert PairedGroup._reduce_scatter_base(paired, share, whole, None) == "reduced 4 into 2"

"""Options of NCCL's groups carry a class and a priority; other backends get none."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from fold3d_patches.registry import apply
from fold3d_patches.schedule import nccl_options
from megatron.fold3d.runtime.transfers import nccl

pytestmark = pytest.mark.skipif(not dist.is_nccl_available(), reason="torch has no NCCL")
TIMEOUT = timedelta(seconds=30)


def test_a_class_and_a_priority_are_set_apart() -> None:
    made = nccl.options("nccl", TIMEOUT, traffic_class=184, first=True)
    assert (made.config.traffic_class, made.is_high_priority_stream) == (184, True)
    assert made._timeout == TIMEOUT
    unmarked = nccl.options("nccl", TIMEOUT, traffic_class=None, first=True)
    default = dist.ProcessGroupNCCL.Options().config.traffic_class
    assert unmarked.config.traffic_class == default
    assert not nccl.options("nccl", TIMEOUT, traffic_class=0).is_high_priority_stream


def test_groups_that_need_no_nccl_options_get_none() -> None:
    assert nccl.options("nccl", TIMEOUT, traffic_class=None) is None
    assert nccl.options("gloo", TIMEOUT, traffic_class=None, first=True) is None


def test_a_torch_without_classes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl_options.check_traffic_classes()
    without = SimpleNamespace(Options=lambda: SimpleNamespace(config=object()))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", without)
    with pytest.raises(ValueError, match="have no traffic_class; use a torch that has it"):
        nccl_options.check_traffic_classes()


def test_traffic_classes_join_the_nccl_options_of_megatrons_file() -> None:
    from megatron.core import parallel_state

    with apply([nccl_options.patch(184, None)]):
        made = parallel_state.get_nccl_options("pp", {"pp": {"max_ctas": 4}})
        assert (made.config.traffic_class, made.config.max_ctas) == (184, 4)
        assert parallel_state.get_nccl_options("pp", {}).config.traffic_class == 184
        assert parallel_state.get_nccl_options("dp_cp", {}) is None
        assert parallel_state.get_nccl_options("tp", {}) is None

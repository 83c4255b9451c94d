"""Groups of ours over NCCL have the options of Megatron's; other backends get none."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fold3d_patches.registry import apply
from fold3d_patches.schedule import nccl_options
from megatron.fold3d.runtime.grad_sync import bucket_groups
from megatron.fold3d.runtime.transfers import nccl, p2p

pytestmark = pytest.mark.skipif(not dist.is_nccl_available(), reason="torch has no NCCL")
TIMEOUT = timedelta(seconds=30)


CPU = torch.device("cpu")


class MegatronsGroup:
    """As a group that Megatron has made over NCCL, with what its file says: `max_ctas: 4`."""

    def __init__(self) -> None:
        self.options = dist.ProcessGroupNCCL.Options()
        self.options.config.max_ctas = 4
        self.options.config.traffic_class = 184

    def _get_backend(self, device: torch.device) -> "MegatronsGroup":
        assert device.type == "cuda"
        return self


def test_a_group_of_ours_has_the_options_of_megatrons() -> None:
    megatrons = MegatronsGroup()
    made = nccl.options("nccl", megatrons, TIMEOUT, first=True)
    assert (made.config.max_ctas, made.config.traffic_class) == (4, 184)
    assert (made.is_high_priority_stream, made._timeout) == (True, TIMEOUT)
    assert not nccl.options("nccl", megatrons, TIMEOUT).is_high_priority_stream
    assert not megatrons.options.is_high_priority_stream
    assert nccl.options("gloo", megatrons, TIMEOUT, first=True) is None


def test_all_groups_of_ours_are_made_with_these_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their backend is said to be NCCL; what they are made with is seen, and gloo is made."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    make, seen = dist.new_group, []

    def new_group(ranks: list[int], *, pg_options: Any, **_: Any) -> Any:
        seen.append((pg_options.config.max_ctas, pg_options.is_high_priority_stream))
        return make(ranks, backend="gloo")

    megatrons = dist.new_group([0])
    monkeypatch.setattr(type(megatrons), "_get_backend", lambda *_: MegatronsGroup(), raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda *_: "nccl")
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "all_gather_object", lambda all_of, ours: all_of.__setitem__(0, ours))
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    try:
        bucket_groups.connect([megatrons], CPU, TIMEOUT)
        p2p.make_groups(megatrons, "nccl", TIMEOUT)
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()
    assert seen == [(4, False), (4, True), (4, True)]


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

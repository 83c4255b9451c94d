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
from megatron.fold3d.runtime.transfers import p2p

pytestmark = pytest.mark.skipif(not dist.is_nccl_available(), reason="torch has no NCCL")
TIMEOUT = timedelta(seconds=30)


CPU = torch.device("cpu")


class MegatronsGroup:
    """As a group that Megatron has made over NCCL, with what its file says: `max_ctas: 4`."""

    def __init__(self) -> None:
        self.options = dist.ProcessGroupNCCL.Options()
        self.options.config.max_ctas = 4
        self.options.config.traffic_class = 184
        self.options._timeout = TIMEOUT


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_groups_of_ours_have_the_options_of_megatrons_over_nccl(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """Their backend is said to be NCCL; what they are made with is seen, and gloo is made."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    make, seen = dist.new_group, list[Any]()

    def new_group(ranks: list[int], *, timeout: timedelta, pg_options: Any, **_: Any) -> Any:
        assert timeout == TIMEOUT
        seen.append(pg_options)
        return make(ranks, backend="gloo")

    theirs, megatrons = MegatronsGroup(), dist.new_group([0])
    monkeypatch.setattr(type(megatrons), "_get_backend", lambda *_: theirs, raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda *_: backend)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "all_gather_object", lambda *_: None)
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    try:
        bucket_groups.connect([megatrons], CPU)
        p2p.groups_by_op(megatrons, backend)
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()
    if backend == "gloo":
        assert seen == [None] * 3
        return
    assert [options.is_high_priority_stream for options in seen] == [False, True, True]
    assert not theirs.options.is_high_priority_stream
    for options in seen:
        assert (options.config.max_ctas, options.config.traffic_class) == (4, 184)
        assert options._timeout == TIMEOUT


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

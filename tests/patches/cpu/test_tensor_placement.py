"""What asks for a GPU stays on the CPU, and what does not ask is not touched."""

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor

from fold3d_patches.cpu.tensor_placement import FACTORIES

pytestmark = pytest.mark.usefixtures("on_cpu")

DEVICES = ("cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 1), 0)


@pytest.mark.parametrize("device", DEVICES, ids=repr)
@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_allocates_on_the_cpu(name: str, device: object) -> None:
    first = torch.ones(2) if name.endswith("_like") else [1.0] if name == "tensor" else 1
    made = getattr(torch, name)(first, device=device, dtype=torch.float64, pin_memory=True)
    assert (made.device.type, made.dtype) == ("cpu", torch.float64)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_still_knows_other_devices(name: str) -> None:
    first = torch.ones(2) if name.endswith("_like") else [1.0] if name == "tensor" else 1
    assert getattr(torch, name)(first, device="meta").device.type == "meta"
    if not name.endswith("_like"):
        with torch.device("meta"):
            assert getattr(torch, name)(first).device.type == "meta"


def test_a_script_may_call_a_factory() -> None:
    def one_more(x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(2, device=x.device)

    assert torch.jit.script(one_more)(torch.ones(2)).tolist() == [2, 2]


def test_tensors_and_modules_stay_where_they_are() -> None:
    tensor, module = torch.ones(1), torch.nn.Linear(1, 1)
    assert tensor.cuda(0, non_blocking=True) is tensor
    assert module.cuda(torch.cuda.current_device()) is module
    assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"


def test_a_type_is_spelled_as_on_a_gpu() -> None:
    assert torch.ones(1).type() == "torch.cuda.FloatTensor"
    assert torch.ones(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.ones(1).type("torch.cuda.HalfTensor").dtype == torch.half
    assert torch.ones(1).type(torch.int32).dtype == torch.int32


def test_a_checkpoint_allocates_on_the_cpu() -> None:
    shard = ShardedTensor.from_rank_offsets("x", torch.ones(2)).without_data()
    shard.init_data("cuda")
    assert shard.data.device.type == "cpu"

"""The codes of DP.sync on a real GPU. `make build-cuda` comes first."""

import pytest
import torch

from megatron.fold3d.runtime.grad_sync.delta_code import (
    SPARE_WORDS,
    checksum,
    decode,
    decode_gradients,
    encode,
    encode_gradients,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [1, 4095, 4097, 1 << 22])
def test_a_gpu_and_a_cpu_decode_what_the_other_writes(dtype: torch.dtype, count: int):
    torch.manual_seed(count)
    weight = 0.02 * torch.randn(count)
    old, new = weight.to(dtype), (weight + 1e-4 * torch.randn(count)).to(dtype)
    new[::50] = torch.randn(len(new[::50])).to(dtype)  # of any distance
    for writer, reader in (("cuda", "cpu"), ("cpu", "cuda")):
        message = encode(new.to(writer), old.to(writer))
        assert int(message[0]) <= len(message)
        received = torch.cat([message, message.new_zeros(SPARE_WORDS)]).to(reader)
        values = old.to(reader, copy=True)
        decode(received, values)
        assert torch.equal(values.cpu().view(torch.int16), new.view(torch.int16))
    assert checksum(new) == checksum(new.cuda()).cpu()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("count", [2, 4096, 4098, 1 << 22])
def test_a_gpu_and_a_cpu_decode_the_gradients_that_the_other_writes(dtype: torch.dtype, count: int):
    torch.manual_seed(count)
    gradients = (1e-4 * torch.randn(count)).to(dtype)
    gradients[::50] = 0
    for writer, reader in (("cuda", "cpu"), ("cpu", "cuda")):
        message = torch.zeros(count + 64, dtype=torch.int32, device=writer)
        encode_gradients(gradients.to(writer), message[:-SPARE_WORDS])
        values = gradients.to(reader, copy=True)
        values.view(torch.int16)[dtype.itemsize // 2 - 1 :: dtype.itemsize // 2] = 0
        decode_gradients(message.to(reader), values)
        assert torch.equal(values.cpu(), gradients)

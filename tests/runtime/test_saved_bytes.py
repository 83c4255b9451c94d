"""What autograd holds is counted once per storage, and until it is freed."""

import torch

from megatron.fold3d.runtime.measure.saved_bytes import SavedBytes


def test_a_storage_counts_once_and_until_its_backward():
    linear = torch.nn.Linear(8, 8)
    meter = SavedBytes([linear])
    x = torch.randn(4, 8, requires_grad=True) * 1.0
    with meter.hooks():
        first = linear(x)  # saves x and the weight
        second = first * x + x[:2].repeat(2, 1) ** 2  # saves first, x, and a copy
    assert meter.now == 3 * x.nbytes
    second.sum().backward()
    assert (meter.now, meter.peak) == (0, 3 * x.nbytes)

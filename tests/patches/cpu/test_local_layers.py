"""With sequence parallelism the norm is torch's, and Megatron knows to sum its gradients."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm

pytestmark = pytest.mark.usefixtures("on_cpu")


def config(normalization: str, sequence_parallel: bool) -> SimpleNamespace:
    return SimpleNamespace(
        sequence_parallel=sequence_parallel,
        normalization=normalization,
        layernorm_zero_centered_gamma=False,
        persist_layer_norm=False,
        memory_efficient_layer_norm=False,
    )


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_results_and_gradients_are_torchs_bit_for_bit(normalization: str) -> None:
    torch.manual_seed(0)
    ours = WrappedTorchNorm(config(normalization, True), 32, eps=1e-5)
    torchs = getattr(torch.nn, normalization)(32, eps=1e-5)
    x, seen = torch.randn(4, 3, 32), []
    for norm in (ours, torchs):
        leaf = x.clone().requires_grad_()
        output = norm(leaf)
        output.square().sum().backward()
        seen.append([output, leaf.grad, *(p.grad for p in norm.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_parameters_are_marked_exactly_under_sequence_parallelism(sequence_parallel: bool) -> None:
    norm = WrappedTorchNorm(config("LayerNorm", sequence_parallel), 8)
    marks = {getattr(parameter, "sequence_parallel", False) for parameter in norm.parameters()}
    assert marks == {sequence_parallel}


def test_what_torchs_norm_cannot_do_is_still_refused() -> None:
    asked = config("LayerNorm", True)
    asked.persist_layer_norm = True
    with pytest.raises(AssertionError, match="persist_layer_norm"):
        WrappedTorchNorm(asked, 8)

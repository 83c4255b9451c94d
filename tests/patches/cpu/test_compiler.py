"""What torch.compile decorates runs as it is written."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("on_cpu")


def test_a_compiled_function_is_called_and_not_compiled() -> None:
    calls = []

    @torch.compile
    def add_one(x: torch.Tensor) -> torch.Tensor:
        calls.append(torch.compiler.is_compiling())
        return x + 1

    assert [add_one(torch.zeros(1)).item() for _ in range(2)] == [1, 1]
    assert calls == [False, False]

"""Every test here runs under the patches that ``--device cpu`` means."""

from collections.abc import Iterator

import pytest

from fold3d_patches import cpu
from fold3d_patches.registry import apply


@pytest.fixture
def on_cpu() -> Iterator[None]:
    with apply(cpu.patches()):
        yield

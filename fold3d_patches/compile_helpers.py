"""Patch ``megatron.core.datasets.utils.compile_helpers``.

Why: it runs ``make`` in Megatron's folder and exits the process when that fails. The wheel has
    the extension built, but no Makefile: every run of an installed Megatron would end there.
Change: nothing is compiled when the extension can be imported.
Remove when: upstream looks for the extension before it builds it.
"""

from collections.abc import Callable
from importlib.util import find_spec

from fold3d_patches.registry import around


@around("megatron.core.datasets.utils:compile_helpers")
def unless_built(upstream: Callable[[], None]) -> None:
    """Build the dataset index helpers, if they are not there."""
    if find_spec("megatron.core.datasets.helpers_cpp") is None:
        upstream()


PATCHES = (unless_built,)

"""Build hooks for what pyproject.toml cannot say; the metadata is all there.

The package is pure Python wherever it is installed. The extension is built into a checkout, with
the torch that is installed there, by ``make extension``: ``python setup.py build_ext --inplace``.
"""

import sys
from typing import Any

from setuptools import setup


def _extension() -> dict[str, Any]:
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    sources = ("gate", "scheduler", "control", "torch_operations", "bindings")
    scheduler = CppExtension(
        "megatron.fold3d.runtime.preemption._scheduler",
        [f"csrc/{name}.cpp" for name in sources],
        extra_compile_args=["-O2", "-g0", "-std=c++20"],
    )
    return {"ext_modules": [scheduler], "cmdclass": {"build_ext": BuildExtension}}


# Elsewhere torch need not be there: pip builds in an environment that holds setuptools alone.
setup(**_extension() if "build_ext" in sys.argv else {})

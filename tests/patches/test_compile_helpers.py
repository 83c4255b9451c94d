"""Megatron's data helpers are built where they have to be, and only there."""

import importlib.util

import pytest

from fold3d_patches import compile_helpers


@pytest.mark.parametrize(("spec", "builds"), [(object(), 0), (None, 1)], ids=["built", "missing"])
def test_the_build_runs_exactly_where_the_extension_is_missing(
    monkeypatch: pytest.MonkeyPatch, spec: object, builds: int
) -> None:
    monkeypatch.setattr(compile_helpers, "find_spec", lambda _name: spec)
    built: list[int] = []
    compile_helpers.unless_built.make(lambda: built.append(1))()
    assert len(built) == builds


def test_the_wheel_has_the_extension() -> None:
    assert importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None

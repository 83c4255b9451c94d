"""What `apply` promises, shown on an upstream of three modules."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fold3d_patches.registry import MEGATRON, Patch, PatchError, apply, around
from megatron.fold3d.training.launch import train


def double(upstream: Callable[..., int]) -> Callable[..., int]:
    return lambda *args: 2 * upstream(*args)


def three(size: int) -> int:
    return 3 * size


class Shape:
    @staticmethod
    def area(size: int) -> int:
        return size * size

    @classmethod
    def name(cls) -> str:
        return cls.__name__

    @property
    def sides(self) -> int:
        return 4


class Square(Shape):
    pass


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``upstream`` defines; ``upstream_user`` has imported a name from it, ``late`` will."""
    defines, user = ModuleType("upstream"), ModuleType("upstream_user")
    vars(defines).update(three=three, Shape=Shape, Square=Square, setting=1)
    vars(user).update(three=three)
    monkeypatch.setitem(sys.modules, "upstream", defines)
    monkeypatch.setitem(sys.modules, "upstream_user", user)
    owners = (defines, Shape, Square, user)
    before = [dict(vars(owner)) for owner in owners]
    yield defines
    assert [dict(vars(owner)) for owner in owners] == before


@pytest.mark.parametrize(
    ("target", "call", "patched"),
    [
        ("upstream:three", lambda: sys.modules["upstream"].three(1), 6),
        ("upstream:Shape.area", lambda: Shape.area(3), 18),
        ("upstream:Shape.area", lambda: Shape().area(3), 18),
        ("upstream:Square.area", lambda: Square.area(3), 18),
        ("upstream:Shape.name", lambda: Shape.name(), "ShapeShape"),
    ],
    ids=[
        *("a function", "static, of the class", "static, of an instance", "inherited"),
        "of a class method",
    ],
)
def test_a_symbol_is_wrapped_and_keeps_its_kind_until_the_stack_closes(
    upstream: Any, target: str, call: Callable[[], Any], patched: Any
) -> None:
    before = call()
    with apply([Patch(target=target, make=double)]):
        assert call() == patched
    assert call() == before


def test_what_is_put_around_a_function_gets_it_first_and_has_its_name(upstream: Any) -> None:
    with apply([around("upstream:three")(lambda upstream, size: upstream(size) + 1)]):
        assert upstream.three(size=1) == 4
        assert upstream.three.__name__ == "three"


def test_an_inherited_method_is_patched_in_the_one_class_only(upstream: Any) -> None:
    with apply([Patch(target="upstream:Square.area", make=double)]):
        assert Shape.area(3) == 9


def test_a_property_and_a_plain_value_are_replaced_as_they_are(upstream: Any) -> None:
    made = [
        Patch(target="upstream:Shape.sides", make=lambda _: property(lambda self: 5)),
        Patch(target="upstream:setting", make=lambda value: value + 1),
    ]
    with apply(made):
        assert (Shape().sides, upstream.setting) == (5, 2)


def test_every_module_that_bound_the_symbol_is_rebound_and_restored(upstream: Any) -> None:
    user = sys.modules["upstream_user"]
    with apply([Patch(target="upstream:three", rebinds=("upstream_user:three",), make=double)]):
        assert user.three is upstream.three
        assert user.three(1) == 6
    assert user.three is three


def test_a_module_that_is_imported_while_patched_is_restored_too(
    upstream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = ModuleType("late")
    with apply([Patch(target="upstream:three", rebinds=("late:three",), make=double)]):
        assert "late" not in sys.modules
        vars(late).update(three=upstream.three)  # from upstream import three
        monkeypatch.setitem(sys.modules, "late", late)
    assert late.three is three


def test_a_site_that_is_not_upstreams_any_more_is_refused(upstream: Any) -> None:
    user = sys.modules["upstream_user"]
    patch = Patch(target="upstream:three", rebinds=("upstream_user:three",), make=double)
    vars(user)["three"] = double(three)
    with pytest.raises(PatchError, match=r"upstream_user.*is not what it was"):
        apply([patch])
    vars(user)["three"] = three
    assert upstream.three is three


def test_all_patches_are_installed_or_none(upstream: Any) -> None:
    def fail(_upstream: Any) -> Any:
        raise KeyError("from make")

    fits, gone, fails = (
        Patch(target=f"upstream:{name}", make=make)
        for name, make in (("three", double), ("gone", double), ("Shape", fail))
    )
    with pytest.raises(PatchError, match="no upstream:gone in the installed version") as raised:
        apply([fits, gone])
    assert raised.value.__notes__ == ["patch of upstream:gone; nothing stays patched"]
    assert upstream.three is three
    with pytest.raises(KeyError, match="from make"):
        apply([fits, fails])
    assert upstream.three is three


def test_a_patch_of_a_symbol_that_is_patched_is_refused(upstream: Any) -> None:
    patch = Patch(target="upstream:three", make=double)
    with apply([patch]), pytest.raises(PatchError, match="upstream:three is patched already"):
        apply([patch])
    apply([patch]).close()


def test_of_patches_that_come_together_the_later_is_around_the_earlier(upstream: Any) -> None:
    user, rebinds = sys.modules["upstream_user"], ("upstream_user:three",)
    doubled = Patch(target="upstream:three", make=double, rebinds=rebinds)
    added = around("upstream:three", rebinds=rebinds)(lambda call, size: call(size) + 1)
    with apply([doubled, added]):
        assert user.three(1) == upstream.three(1) == 7
    assert user.three is upstream.three is three


@pytest.mark.parametrize(
    "target", ["upstream:three.size", "upstream:Round.area", "upstream:Shape.x"]
)
def test_a_symbol_that_moved_is_named(upstream: Any, target: str) -> None:
    with pytest.raises(PatchError, match=f"no {target} in the installed version"):
        apply([Patch(target=target, make=double)])


def test_a_symbol_with_other_parameters_is_refused_and_shows_them(upstream: Any) -> None:
    for absent in ("width height", "width /", "size width /", "size / width"):
        with pytest.raises(PatchError) as raised:
            apply([Patch(target="upstream:three", parameters=absent, make=double)])
        assert f"three takes (size) here, the patch relies on ({absent})" in str(raised.value)


@pytest.mark.parametrize("parameters", ["", "size", "size /", "scale", "size / unit", "unit scale"])
def test_a_patch_names_only_the_parameters_that_it_relies_on(
    upstream: Any, parameters: str
) -> None:
    upstream.three = lambda size, scale=1, unit="m": 3 * size  # the later ones are new
    apply([Patch(target="upstream:three", parameters=parameters, make=double)]).close()
    upstream.three = three


def test_parameters_by_position_come_first_and_in_order(upstream: Any) -> None:
    upstream.three = lambda new, size, scale: 3 * size
    for moved in ("size /", "new scale /"):
        with pytest.raises(PatchError, match="relies on"):
            apply([Patch(target="upstream:three", parameters=moved, make=double)])
    upstream.three = three


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A checkout of Megatron-LM in front of the wheel, as PYTHONPATH puts it; tells its folder."""

    def make(version: str) -> Path:
        core = tmp_path / "megatron" / "core"
        core.mkdir(parents=True)
        (core / "__init__.py").write_text("raise AttributeError('something that is not there yet')")
        (core / "package_info.py").write_text(f"__version__ = {version!r}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in ("megatron", "megatron.core"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        return core

    return make


@pytest.mark.parametrize("version", ["0.16.1", "0.17.0", "0.20.0rc1", "0.99.0+a1b2c3d", "1.0"])
def test_what_is_imported_is_refused_if_it_is_of_another_version(
    checkout: Callable[[str], Path], version: str
) -> None:
    core = checkout(version)
    with pytest.raises(PatchError) as raised:
        apply([Patch(target="megatron.core.package_info:MAJOR", make=double)])
    assert str(raised.value) == (
        f"megatron-core {version.partition('+')[0]} is imported, from {core}, the patches fit "
        f"{MEGATRON}; take that folder off PYTHONPATH if it is there, or run: "
        f"pip install 'megatron-core[training]{MEGATRON}'"
    )


def test_a_launch_looks_at_the_version_before_it_imports_megatron(
    checkout: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    checkout("0.99.0")
    assert train(["--device", "cpu"], "gpt") == 2
    assert "error: megatron-core 0.99.0 is imported" in capsys.readouterr().err


def test_the_version_of_megatron_does_not_concern_a_patch_of_something_else(
    upstream: Any, checkout: Callable[[str], Path]
) -> None:
    checkout("0.1")
    apply([Patch(target="upstream:three", make=double)]).close()


def test_closing_says_when_other_code_has_replaced_a_patch(upstream: Any) -> None:
    undo = apply([Patch(target="upstream:three", make=double)])
    upstream.three = three
    with pytest.raises(PatchError, match="some other code replaced it"):
        undo.close()

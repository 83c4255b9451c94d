"""Replace upstream symbols, all of them or none, and restore them.

Keeps one invariant: after `apply` raises, and after its stack closes, every symbol is restored.
"""

import functools
import inspect
import logging
import runpy
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megatron.fold3d.upstream import versions

logger = logging.getLogger(__name__)

MEGATRON = SpecifierSet(versions.MEGATRON)

_ABSENT: Any = object()
_patched: set[tuple[int, str]] = set()  # (id of the owner, name) of each symbol patched now


class PatchError(RuntimeError):
    """A patch does not fit the installed upstream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One upstream symbol and its replacement.

    Attributes:
        target: the symbol, spelled ``package.module:attribute.path``.
        make: takes the upstream object (a static or class method's function) and returns the
            replacement.
        rebinds: names in other modules that are bound to the same object, spelled like ``target``.
        parameters: the names of the upstream parameters that the replacement relies on, with
            spaces between. Those before a ``/`` are given by position: upstream's begin so.
    """

    target: str
    make: Callable[[Any], Any]
    rebinds: tuple[str, ...] = ()
    parameters: str = ""


def replace(target: str, ours: Any, **others: Any) -> Patch:
    """Return the patch that puts ``ours`` in the place of a symbol, and never calls upstream's."""
    return Patch(target=target, make=lambda _: ours, **others)


def around(target: str, **others: Any) -> Callable[[Callable[..., Any]], Patch]:
    """Make of a function the patch that calls it for a symbol: with upstream's, then the arguments.

    What stands there has upstream's name and attributes, by which Megatron finds some functions.
    """

    def patch(ours: Callable[..., Any]) -> Patch:
        def make(upstream: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(upstream)
            def call(*args: Any, **kwargs: Any) -> Any:
                return ours(upstream, *args, **kwargs)

            return call

        return Patch(target=target, make=make, **others)

    return patch


def apply(patches: Sequence[Patch]) -> ExitStack:
    """Install every patch, or none of them; closing the stack restores upstream.

    Of several patches of one symbol, the later is around what the earlier makes.

    Raises:
        PatchError: a version, a symbol or a signature is not the one the patch was written for, or
            patches that are not closed yet have the symbol.
    """
    if any(patch.target.startswith("megatron.") for patch in patches):
        check_version()
    before = frozenset(_patched)
    with ExitStack() as undo:
        for patch in patches:
            try:
                _install(patch, undo, before)
            except Exception as error:
                error.add_note(f"patch of {patch.target}; nothing stays patched")
                raise
            logger.debug("patched %s", patch.target)
        symbols = {patch.target for patch in patches}
        logger.info("patched %d symbols of Megatron and torch", len(symbols))
        return undo.pop_all()


def check_version() -> None:
    """Refuse a Megatron-core that the patches were not written for.

    The version is that of the code that Python imports: a checkout on PYTHONPATH comes before the
    wheel.

    Raises:
        PatchError: Megatron-core is of another version, or not installed.
    """
    spec = find_spec("megatron.core")
    fix = f"pip install 'megatron-core[training]{MEGATRON}'"
    if spec is None or spec.origin is None:
        raise PatchError(f"no megatron.core to import; run: {fix}")
    folder = Path(spec.origin).parent
    # Run as a single file: importing another version may fail with an error that explains nothing.
    version = Version(runpy.run_path(str(folder / "package_info.py"))["__version__"])
    if version not in MEGATRON:
        raise PatchError(
            f"megatron-core {version.public} is imported, from {folder}, the patches fit "
            f"{MEGATRON}; take that folder off PYTHONPATH if it is there, or run: {fix}"
        )


def _install(patch: Patch, undo: ExitStack, before: Collection[tuple[int, str]]) -> None:
    owner, name = _locate(patch.target)
    if (id(owner), name) in before:
        raise PatchError(f"{patch.target} is patched already; close that patch first")
    upstream = inspect.getattr_static(owner, name)
    wrap = type(upstream) if isinstance(upstream, staticmethod | classmethod) else None
    function = upstream.__func__ if wrap else upstream
    _check_parameters(patch, function)
    made = patch.make(function)
    ours = wrap(made) if wrap else made
    there = vars(owner).get(name, _ABSENT)  # where it is inherited

    _swap(owner, name, there, ours)
    undo.callback(_swap, owner, name, ours, there)
    _patched.add((id(owner), name))
    undo.callback(_patched.discard, (id(owner), name))
    for site in patch.rebinds:
        # A module imported later binds our object by itself and must be restored as well: so each
        # site is visited now, and again when the stack closes.
        _rebind(site, upstream, ours)
        undo.callback(_rebind, site, ours, upstream)


def _check_parameters(patch: Patch, function: Any) -> None:
    if not patch.parameters:
        return
    found = list(inspect.signature(function).parameters)
    by_position, _, by_name = patch.parameters.rpartition("/")
    first = by_position.split()
    if found[: len(first)] != first or not set(by_name.split()) <= set(found):
        raise PatchError(
            f"{patch.target} takes ({' '.join(found)}) here, the patch relies on "
            f"({patch.parameters}); read what upstream changed, then update the patch"
        )


def _locate(symbol: str) -> tuple[Any, str]:
    module, _, path = symbol.partition(":")
    *parents, name = path.split(".")
    owner: Any = import_module(module)
    for parent in parents:
        owner = getattr(owner, parent, _ABSENT)
    if owner is _ABSENT or inspect.getattr_static(owner, name, _ABSENT) is _ABSENT:
        raise PatchError(f"no {symbol} in the installed version; find where upstream has it now")
    return owner, name


def _rebind(site: str, old: Any, new: Any) -> None:
    if site.partition(":")[0] in sys.modules:
        _swap(*_locate(site), old, new)


def _swap(owner: Any, name: str, old: Any, new: Any) -> None:
    if vars(owner).get(name, _ABSENT) is not old:
        raise PatchError(f"{owner}.{name} is not what it was; some other code replaced it")
    if new is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, new)

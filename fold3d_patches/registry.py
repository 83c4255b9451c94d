"""Replace upstream symbols, all of them or none, and put them back.

The one invariant: when `apply` raises or its stack closes, every symbol is what it was before.
"""

import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from packaging.specifiers import SpecifierSet

logger = logging.getLogger(__name__)

MEGATRON = SpecifierSet(">=0.19.2,<0.20")
_ABSENT = object()
_patched: set[tuple[int, str]] = set()  # (id(owner), name) of every patched target


class PatchError(RuntimeError):
    """A patch does not fit the upstream that is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One upstream symbol and what takes its place.

    ``target`` and ``rebinds`` are spelled ``package.module:attribute.path``; ``rebinds`` are the
    modules that hold the same object under a name of their own. ``make`` gets upstream's object
    and returns ours. ``parameters`` are the names of upstream's parameters that ours relies on,
    all of them and in order; None for a symbol whose signature says nothing.
    """

    target: str
    make: Callable[[Any], Any]
    rebinds: tuple[str, ...] = ()
    parameters: tuple[str, ...] | None = None


def apply(patches: Sequence[Patch]) -> ExitStack:
    """Install every patch, or none of them; closing the stack restores upstream.

    Raises:
        PatchError: upstream's version, a symbol or a signature is not the one the patch is for.
    """
    _check_version(patches)
    with ExitStack() as stack:
        for patch in patches:
            try:
                _install(patch, stack)
            except PatchError as error:
                error.add_note(f"while patching {patch.target}; nothing stays patched")
                raise
            logger.debug("patched %s", patch.target)
        return stack.pop_all()


def _check_version(patches: Sequence[Patch]) -> None:
    if not any(patch.target.startswith("megatron.") for patch in patches):
        return
    found = metadata.version("megatron-core")
    if found not in MEGATRON:
        raise PatchError(
            f"megatron-core {found} is installed, the patches fit {MEGATRON}; "
            f'run: pip install "megatron-core[training]{MEGATRON}"'
        )


def _install(patch: Patch, stack: ExitStack) -> None:
    module, _, path = patch.target.partition(":")
    owner, name = _locate(import_module(module), path)
    if (id(owner), name) in _patched:
        raise PatchError(f"{patch.target} is patched already; close the first patch before")
    before = vars(owner).get(name, _ABSENT)  # absent where a class inherits the attribute
    upstream = inspect.getattr_static(owner, name)
    wrap = type(upstream) if isinstance(upstream, staticmethod | classmethod) else None
    callee = upstream.__func__ if wrap else upstream
    if patch.parameters is not None:
        found = tuple(inspect.signature(callee).parameters)
        if found != patch.parameters:
            raise PatchError(
                f"{patch.target} takes {found} in this version, the patch was written for "
                f"{patch.parameters}; read upstream's change, then update the patch"
            )
    ours = wrap(patch.make(callee)) if wrap else patch.make(callee)

    _patched.add((id(owner), name))
    stack.callback(_patched.discard, (id(owner), name))
    stack.callback(_swap, owner, name, ours, before)
    setattr(owner, name, ours)
    for site in patch.rebinds:
        # A module that is not imported yet will bind ours by itself, and keep it past close():
        # so each site is looked up again then, and not remembered now.
        _rebind(site, upstream, ours, strict=True)
        stack.callback(_rebind, site, ours, upstream, strict=False)


def _locate(owner: Any, path: str) -> tuple[Any, str]:
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, _ABSENT)
    if owner is _ABSENT or inspect.getattr_static(owner, name, _ABSENT) is _ABSENT:
        raise PatchError(f"no {path} in the installed version; upstream moved or renamed it")
    return owner, name


def _rebind(site: str, old: Any, new: Any, *, strict: bool) -> None:
    module, _, path = site.partition(":")
    if module not in sys.modules:
        return
    owner, name = _locate(sys.modules[module], path)
    if strict and vars(owner).get(name) is not old:
        raise PatchError(f"{site} is not bound to upstream's object; some other code replaced it")
    _swap(owner, name, old, new)


def _swap(owner: Any, name: str, old: Any, new: Any) -> None:
    if vars(owner).get(name) is not old:
        logger.warning("%s.%s was replaced by other code; left as it is", owner, name)
    elif new is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, new)

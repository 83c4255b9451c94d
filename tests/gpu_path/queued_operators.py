"""Operators that the host only launches: they run later, in order, on a device's current stream.

Keeps one invariant: the host never sees a value before the operator that computes it has run.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.gpu_path.late_device import LateDevice

_ALLOCATES = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_NOW = ("set_", "resize_", "detach", "alias")
_WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero")  # for their result
_RANDOM = ("rand", "bernoulli", "dropout", "multinomial", "normal_", "uniform_")


class QueuedOperators(TorchDispatchMode):
    """Inside, operators on CPU tensors are launched on a device's current stream.

    The first operator of its kind and shapes runs at once, behind what is queued, and shows the
    shape of its results.
    """

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device
        self._kinds: dict[Any, Any] = {}

    def __enter__(self) -> Any:
        self._device.is_queued = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None:
            self._device.compute.finish()
        self._device.is_queued = False

    @contextmanager
    def in_another_thread(self) -> Iterator[None]:
        """Launch the operators of the calling thread, too, while a first thread is inside."""
        number = threading.get_ident()
        self._device.hosts.add(number)
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)
            self._device.hosts.discard(number)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.is_view or name in _NOW:
            return func(*args, **kwargs)
        if name in _WAITS:
            self._device.note_host_wait()
        flat, spec = _flatten(args, kwargs)
        if any(isinstance(a, torch.Tensor) and a.device.type != "cpu" for a in flat):
            return func(*args, **kwargs)
        try:
            key = func, spec, tuple(map(_signature, flat))
            kind = self._kinds.get(key)
        except TypeError:  # an argument that has no hash
            return self._now(func, args, kwargs)
        if kind is None:
            return self._learn(key, name, func, args, kwargs, flat)
        if kind == "now":
            return self._now(func, args, kwargs)
        if kind == "view":
            return func(*args, **kwargs)
        if kind == "allocation":
            like = func(*args, **kwargs)
            return self._device.memory.take(like.shape, like.stride(), like.dtype)
        results = self._launch(func, flat, spec, kind)
        if isinstance(kind, _InPlace):
            return args[0] if kind.returns_first else None
        return tree_unflatten(results, kind.spec)

    def _launch(self, func: Any, flat: list[Any], spec: Any, kind: Any) -> list[torch.Tensor]:
        lend = self._device.memory.lend
        read = [a for a in flat if isinstance(a, torch.Tensor)]
        lent = [(i, lend(a)) for i, a in enumerate(flat) if isinstance(a, torch.Tensor)]
        others = [None if isinstance(a, torch.Tensor) else a for a in flat]
        results: list[torch.Tensor] = []

        def call() -> Any:
            for place, find in lent:
                others[place] = find()
            args, kwargs = _unflatten(others, spec)
            return func(*args, **kwargs)

        if isinstance(kind, _InPlace):
            run, written = call, _written(func, spec, flat)
        else:
            written = results = [self._device.memory.take(*shape) for shape in kind.shapes]
            targets = [lend(result) for result in results]

            def run() -> None:
                found = call()
                computed = [found] if isinstance(found, torch.Tensor) else tree_flatten(found)[0]
                for target, result in zip(targets, computed, strict=True):
                    target().copy_(result)

        name = func.overloadpacket.__name__
        self._device.queue_operator(run, name, reads=read, writes=written)
        return results

    def _now(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._device.current_stream().finish()
        return func(*args, **kwargs)

    def _learn(
        self, key: Any, name: str, func: Any, args: Any, kwargs: Any, flat: list[Any]
    ) -> Any:
        if name in _ALLOCATES:
            like = func(*args, **kwargs)
            self._kinds[key] = "allocation"
            return self._device.memory.take(like.shape, like.stride(), like.dtype)
        result = self._now(func, args, kwargs)
        results, spec = tree_flatten(result)
        inputs = {_address(a) for a in flat if isinstance(a, torch.Tensor)}
        if any(part in name for part in _RANDOM):
            self._kinds[key] = "now"
        elif func._schema.is_mutable:
            first = bool(args) and result is args[0]
            plain = first or result is None
            self._kinds[key] = _InPlace(first) if plain else "now"
        elif not results or not all(isinstance(r, torch.Tensor) for r in results):
            self._kinds[key] = "now"
        elif func.is_view or any(_address(r) in inputs for r in results if r.numel()):
            self._kinds[key] = "view"
        else:
            shapes = [(tuple(r.shape), r.stride(), r.dtype) for r in results]
            self._kinds[key] = _New(shapes, spec)
            ours = [self._device.memory.take(*shape) for shape in shapes]
            self._device.current_stream().finish()  # what was there is gone
            for mine, theirs in zip(ours, results, strict=True):
                mine.copy_(theirs)
            return tree_unflatten(ours, spec)
        return result


def _flatten(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return what `tree_flatten` would; where nothing is nested, faster."""
    values = (*args, *kwargs.values())
    if any(isinstance(value, list | tuple | dict) for value in values):
        return tree_flatten((args, kwargs))
    return values, (len(args), *kwargs)


def _unflatten(values: Any, spec: Any) -> Any:
    if isinstance(spec, tuple):
        number, *names = spec
        return values[:number], dict(zip(names, values[number:], strict=True))
    return tree_unflatten(values, spec)


def _written(func: Any, spec: Any, flat: Any) -> list[torch.Tensor]:
    """Return the arguments that an operator changes."""
    args, kwargs = _unflatten(flat, spec)
    written = []
    for place, name in _changed(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        found, _ = tree_flatten(value)
        written += [tensor for tensor in found if isinstance(tensor, torch.Tensor)]
    return written


@functools.cache
def _changed(func: Any) -> list[tuple[int, str]]:
    """Return the places and names of the arguments that an operator changes."""
    return [
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


class _InPlace:
    def __init__(self, returns_first: bool) -> None:
        self.returns_first = returns_first


class _New:
    def __init__(self, shapes: Any, spec: Any) -> None:
        self.shapes, self.spec = shapes, spec


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _signature(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return tuple(argument.shape), argument.stride(), argument.dtype
    hash(argument)
    return type(argument), argument

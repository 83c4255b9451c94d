"""Delayed weight gradients of Transformer Engine's modules, through its own ``wgrad_store``.

If a module's ``wgrad_store`` is enabled, its backward computes only the input gradient. It stores
the operands of the weight gradient, together with the matmul to run on them. ``backward_dw`` takes
the oldest entry of the store and runs it, so `Plans` refuses any other order. With fused
accumulation the matmul adds to ``main_grad``; otherwise it puts the gradient into ``grad``.
Megatron uses this for expert parallelism only (``--delay-wgrad-compute``), in all layers of a
model.

    backward of 1B0, 1B1     store  [x0, dy0], [x1, dy1]     DDP's hooks are put off
    1W0                      backward_dw takes  [x0, dy0]    and DDP's hooks run

Keeps one invariant: the operations on a parameter, and their order, are those of a run that does
not split its backwards, so that sums are equal bit for bit.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.fold3d.plan.ir import Action
from megatron.fold3d.runtime.weight_grads.by_parameter import SplitBackwards

Hook = Callable[[], None]


class EngineWeightGrads(SplitBackwards[Any]):
    """The modules of one rank whose weight gradients are delayed.

    Attributes:
        modules: Transformer Engine's modules in the transformer layers of a stage, by stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.modules: dict[int, list[Any]] = {}
        self._delayed: frozenset[torch.Tensor] = frozenset()
        self._backwards = 0  # that are running: two of a pair
        self._put_off: dict[torch.Tensor, tuple[Hook, torch.Tensor | None]] = {}

    def choose(self, chunks: Mapping[int, torch.nn.Module]) -> None:
        """Delay the gradients of Transformer Engine's modules in the layers of ``chunks``.

        Modules outside of transformer layers do not change, nor do norms and modules that are not
        Transformer Engine's, such as a router.
        """
        before = [*chain.from_iterable(self.modules.values())]
        self.modules = {stage: list(_splittable(chunk)) for stage, chunk in chunks.items()}
        now = [*chain.from_iterable(self.modules.values())]
        for modules, delays in ((before, False), (now, True)):
            for module in modules:
                module.wgrad_store = type(module.wgrad_store)(delay_wgrad_compute=delays)
        self._delayed = frozenset(p for module in now for p in module.parameters(recurse=False))

    @contextmanager
    def keeping(self, backward: Action) -> Iterator[None]:
        """Note which modules of a stage store operands in the backward inside the block."""
        modules = self.modules[backward.stage]
        before = [_num_stored(module) for module in modules]
        self._backwards += 1
        try:
            yield
        finally:
            self._backwards -= 1
        grown = [m for m, n in zip(modules, before, strict=True) if _num_stored(m) > n]
        self._kept[backward.stage, backward.microbatch] = grown

    def puts_off(self, parameter: torch.Tensor, hook: Hook) -> bool:
        """Return True if DDP's hook of this parameter is to run with its weight gradient.

        ``parameter`` is the model's: a weight, ``[output, hidden]``, or a bias, ``[output]``.
        Until then a weight's gradient from autograd is not valid: it is a dummy, with fused
        accumulation, or memory that the matmul has not written yet. A bias's may be valid.
        """
        if not self._backwards or parameter not in self._delayed:
            return False
        is_weight = parameter.dim() > 1
        if not is_weight and parameter.grad is not None:
            return False  # computed in the backward
        # DDP's hook asks for a gradient even where the matmul has added it to main_grad.
        is_fused = is_weight and getattr(parameter, "grad_added_to_main_grad", False)
        self._put_off[parameter] = hook, parameter.grad if is_fused else None
        parameter.grad = None
        return True

    def _parameters(self, item: Any) -> Sequence[torch.Tensor]:
        return tuple(item.parameters(recurse=False))

    def _add(self, items: Iterable[Any]) -> None:
        """Compute the oldest weight gradients of some modules; DDP's hooks accumulate them.

        If accumulation is fused, the matmul itself adds them to ``main_grad``.
        """
        for module in items:
            put_off = {p for p in module.parameters(recurse=False) if p in self._put_off}
            _compute_delayed(module, put_off)
            for parameter in put_off:
                hook, dummy = self._put_off[parameter]
                if parameter.grad is None:
                    parameter.grad = dummy
                hook()


def _splittable(chunk: torch.nn.Module) -> Iterator[Any]:
    """Yield Transformer Engine's modules in a chunk's transformer layers, in order of backwards."""
    found: dict[Any, None] = {
        module: None
        for layer in chunk.modules()
        if isinstance(layer, TransformerLayer)
        for module in layer.modules()
        if getattr(module, "wgrad_store", None) is not None
    }
    yield from reversed(found)


def _num_stored(module: Any) -> int:
    return int(module.wgrad_store.context.qsize())


def _compute_delayed(module: Any, put_off: set[torch.nn.Parameter]) -> None:
    """Call ``backward_dw`` of Transformer Engine.

    Megatron's override does nothing without its own flag. If a bias's gradient was computed in the
    backward, Transformer Engine expects it to be still there, and does not change it.
    """
    already = [p for p in module.parameters(recurse=False) if p.grad is None and p not in put_off]
    for parameter in already:
        parameter.grad = parameter.detach()
    engine: Any = next(
        kind
        for kind in type(module).__mro__
        if "backward_dw" in vars(kind) and not kind.__module__.startswith("megatron.")
    )
    engine.backward_dw(module)
    for parameter in already:
        parameter.grad = None

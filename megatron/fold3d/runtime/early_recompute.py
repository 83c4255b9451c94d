"""Recomputation ahead of a backward: the implementation of `RECOMPUTE` actions.

With full recomputation a forward saves only the inputs of its units, each of one or a few layers. A
unit's backward first runs its forward again. For micro-batches with a `RECOMPUTE` action this
happens earlier, while the rank would wait for the gradient; the backward then reuses the result.

Keeps one invariant: a unit is recomputed from the same inputs and random states by the same
operations as in Megatron's own backward, and no more than once, so results are equal bit for bit.
"""

import threading
from collections.abc import Callable
from itertools import compress
from typing import Any

import torch
from megatron.core.tensor_parallel import random

from megatron.fold3d.plan.ir import Action, Op
from megatron.fold3d.plan.passes.recompute import recomputed
from megatron.fold3d.runtime.feature import Feature, Handlers, Iteration, Key


class EarlyRecompute(Feature):
    """The units of the micro-batches that are recomputed ahead of their backward."""

    def __init__(self) -> None:
        self._planned: frozenset[Key] = frozenset()
        self._units: dict[Key, list[Any]] = {}  # their autograd contexts
        # The units of the running forward, if it is planned; of a pair each has a thread.
        self._now = threading.local()

    def prepare(self, iteration: Iteration) -> None:
        """Note which micro-batches of an iteration have `RECOMPUTE` actions; forget all units."""
        self._planned = recomputed(iteration.program)
        self._units.clear()
        self._now.units = None

    def handlers(self, iteration: Iteration, inner: Handlers) -> Handlers:
        """Return the handler of RECOMPUTE, and a wrapper that records the units of forwards."""
        run_forward = inner[Op.FORWARD]

        def forward(action: Action) -> None:
            key = action.stage, action.microbatch
            self._now.units = self._units.setdefault(key, []) if key in self._planned else None
            run_forward(action)

        return {Op.FORWARD: forward, Op.RECOMPUTE: self.compute}

    def checkpoint(
        self,
        upstream: Callable[..., Any],
        function: Callable[..., Any],
        distribute_saved_activations: bool,
        *args: Any,
    ) -> Any:
        """Run a unit as Megatron's ``checkpoint`` does; note it if it is to be recomputed early."""
        units = getattr(self._now, "units", None)
        if units is None or not torch.is_grad_enabled():
            return upstream(function, distribute_saved_activations, *args)
        return _Unit.apply(function, distribute_saved_activations, units, *args)

    def compute(self, action: Action) -> None:
        """Recompute all units of one stage and micro-batch, and keep the results for the backward.

        The inputs and outputs stay on the device until the unit's backward has used them. As in
        Megatron's own backward, the last unit comes first: two may update one router's mean.
        """
        for unit in reversed(self._units.pop((action.stage, action.microbatch))):
            unit.early = _recompute(unit)


class _Unit(random.CheckpointFunction):  # type: ignore[misc]
    """Megatron's ``CheckpointFunction``, whose backward uses an early recomputation if any."""

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Any],
        distribute_saved_activations: bool,
        units: list[Any],
        *args: Any,
    ) -> Any:
        ctx.early = None
        units.append(ctx)
        return random.CheckpointFunction.forward(ctx, function, distribute_saved_activations, *args)

    @staticmethod
    def backward(ctx: Any, *output_grads: Any) -> Any:
        if ctx.early is None:
            nothing, also_nothing, *grads = random.CheckpointFunction.backward(ctx, *output_grads)
            return nothing, also_nothing, None, *grads
        (inputs, outputs), ctx.early = ctx.early, None
        used = [torch.is_tensor(output) and output.requires_grad for output in outputs]
        random._set_checkpointing()
        torch.autograd.backward(
            list(compress(outputs, used)), grad_tensors=list(compress(output_grads, used))
        )
        random._unset_checkpointing()
        return None, None, None, *(x.grad if torch.is_tensor(x) else None for x in inputs)


def _recompute(unit: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Run a unit's forward again; return its detached inputs and its outputs."""
    random._set_checkpointing()
    with random._fork_rng():
        random._set_all_rng_states(*unit.rng_states)
        inputs = random.detach_variable(unit.saved_tensors)
        with torch.enable_grad():
            outputs = unit.run_function(*inputs)
    random._unset_checkpointing()
    return inputs, outputs if isinstance(outputs, tuple) else (outputs,)

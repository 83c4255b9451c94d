"""An iteration's optimizer step, taken part by part: each part as soon as its gradients are there.

Keeps one invariant: whenever a part is stepped, the step is that of its own iteration. Learning
rate, weight decay, step count and loss scale are those of the moment at which Megatron asked for
the step.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.grad_scaler import ConstantGradScaler

# What changes from one iteration to the next: the scheduler sets the first two, and fused
# optimizers (apex, Transformer Engine) count steps per group where torch counts per parameter.
_OF_AN_ITERATION = ("lr", "weight_decay", "step")

# The groups in which Megatron's Float16OptimizerWithFloat16Params keeps copies and originals.
_LISTS_OF_GROUPS = ("float16_groups", "fp32_from_float16_groups", "fp32_from_fp32_groups")


class LateStep:
    """The step of one iteration, through Megatron's own optimizer.

    Every parameter of the optimizer is to be stepped once, in any order and in any parts. Where
    there is a loss scaler, all gradients are known to be finite, and the scaler is told at once.

    Args:
        optimizer: Megatron's, with its parts in ``chained_optimizers``.
        iteration: whose step this is.
        alone: a process group of this rank only, needed with a loss scaler.
    """

    def __init__(
        self, optimizer: Any, iteration: int, alone: dist.ProcessGroup | None = None
    ) -> None:
        self.iteration = iteration
        self._optimizer = optimizer
        self._settings = [_settings(group) for group in self._groups()]
        device = optimizer.get_loss_scale().device
        self._squares = [torch.zeros((), device=device) for _ in optimizer.chained_optimizers]
        self._alone = alone
        self._scaled = [o for o in optimizer.chained_optimizers if getattr(o, "grad_scaler", None)]
        self._scalers = [ConstantGradScaler(o.grad_scaler.scale.item()) for o in self._scaled]
        for megatrons in self._scaled:
            megatrons.grad_scaler.update(found_inf=False)

    @torch.no_grad()
    def take(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Step ``parameters`` with the reduced gradients in their ``main_grad``."""
        with self._narrowed_to(parameters), self._with_its_settings(), self._with_its_scale():
            found_inf = self._optimizer.prepare_grads()
            assert not found_inf, "gradients were finite when this step was allowed"
            for square, megatrons in zip(
                self._squares, self._optimizer.chained_optimizers, strict=True
            ):
                grads = megatrons.get_grads_for_grad_norm()
                if grads:
                    square += torch.nn.utils.get_total_norm(grads).float() ** 2
            self._optimizer.step_with_ready_grads()
            self._optimizer.zero_grad()

    def grad_norm(self) -> float:
        """Return the norm of all gradients, once all are stepped; every rank calls this."""
        for square, megatrons in zip(
            self._squares, self._optimizer.chained_optimizers, strict=True
        ):
            torch.distributed.all_reduce(square, group=megatrons.get_grad_stats_parallel_group())
        return math.sqrt(sum(square.item() for square in self._squares))

    @contextmanager
    def _narrowed_to(self, parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
        """Take all other parameters out of the optimizer's lists for a while."""
        kept = set()
        for parameter in parameters:
            kept |= {id(parameter), id(getattr(parameter, "main_param", parameter))}
        lists = list(self._parameter_lists())
        whole = [list(parameters) for parameters in lists]
        try:
            for parameters in lists:
                parameters[:] = (p for p in parameters if id(p) in kept)
            yield
        finally:
            for parameters, before in zip(lists, whole, strict=True):
                parameters[:] = before

    @contextmanager
    def _with_its_settings(self) -> Iterator[None]:
        groups = list(self._groups())
        now = [_settings(group) for group in groups]
        try:
            for group, settings in zip(groups, self._settings, strict=True):
                _set(group, settings)
            yield
        finally:
            for group, settings in zip(groups, now, strict=True):
                if group["params"]:  # it has counted this step, or counts per parameter
                    settings |= {"step": group["step"]} if "step" in group else {}
                _set(group, settings)

    @contextmanager
    def _with_its_scale(self) -> Iterator[None]:
        """Unscale by the iteration's scale, and ask no other rank whether the result is finite."""
        now = [(o.grad_scaler, o.get_grad_stats_parallel_group()) for o in self._scaled]
        try:
            for megatrons, scaler in zip(self._scaled, self._scalers, strict=True):
                megatrons.grad_scaler, megatrons.grad_stats_parallel_group = scaler, self._alone
            yield
        finally:
            for megatrons, (scaler, group) in zip(self._scaled, now, strict=True):
                megatrons.grad_scaler, megatrons.grad_stats_parallel_group = scaler, group

    def _groups(self) -> Iterator[dict[str, Any]]:
        for megatrons in self._optimizer.chained_optimizers:
            if not megatrons.is_stub_optimizer:
                yield from megatrons.optimizer.param_groups

    def _parameter_lists(self) -> Iterator[list[torch.nn.Parameter]]:
        for group in self._groups():
            yield group["params"]
        for megatrons in self._optimizer.chained_optimizers:
            for name in _LISTS_OF_GROUPS:
                yield from getattr(megatrons, name, ())


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in _OF_AN_ITERATION if key in group}


def _set(group: dict[str, Any], settings: dict[str, Any]) -> None:
    for key in _OF_AN_ITERATION:
        group.pop(key, None)
    group.update(settings)

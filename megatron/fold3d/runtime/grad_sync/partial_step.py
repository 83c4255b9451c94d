"""An iteration's optimizer step, taken part by part as the gradients are reduced.

Keeps one invariant: a parameter is stepped with the settings of the gradients' iteration, however
late. Learning rate, weight decay, step count and loss scale are those at the time when Megatron
asked for the step.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core.optimizer.grad_scaler import ConstantGradScaler

# What changes from one iteration to the next: the scheduler sets the first two, and fused
# optimizers (apex, Transformer Engine) count steps per group where torch counts per parameter.
_OF_AN_ITERATION = ("lr", "weight_decay", "step")

# What Megatron's optimizers keep by group: Float16OptimizerWithFloat16Params, the first two rows,
# parameters and copies of them; DistributedOptimizer parameters and the shards of this rank. The
# lists of a row go side by side, and what is stepped comes last.
_ROWS = (
    ("float16_groups", "fp32_from_float16_groups"),
    ("fp32_from_fp32_groups",),
    ("model_float16_groups", "shard_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups"),
)


class PartialStep:
    """The step of one iteration, through Megatron's own optimizer; no part makes the host wait.

    Every parameter of the optimizer must be stepped exactly once, in any order and grouping. With a
    loss scaler, all gradients must be known to be finite: the constructor already updates the
    scaler with that.

    Args:
        optimizer: Megatron's ``ChainedOptimizer``.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._settings = [_settings(group) for group in self._groups()]
        device = optimizer.get_loss_scale().device
        self._squares = [torch.zeros((), device=device) for _ in optimizer.chained_optimizers]
        parts = optimizer.chained_optimizers
        self._scaled = [part for part in parts if getattr(part, "grad_scaler", None)]
        self._scalers = [ConstantGradScaler(p.grad_scaler.scale.item()) for p in self._scaled]
        for part in self._scaled:
            part.grad_scaler.update(found_inf=False)
            part.found_inf.zero_()

    @torch.no_grad()
    def take(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Step ``parameters`` with the reduced gradients in their ``main_grad``.

        DDP owns these gradients, which must be complete on the current stream. The updated
        parameters are valid there. With the distributed optimizer only this rank's shards are
        updated, and nothing is gathered.
        """
        with self._narrowed_to(parameters), self._settings_applied(), self._without_others():
            self._optimizer.prepare_grads()
            for square, part in self._squares_of_parts():
                if grads := part.get_grads_for_grad_norm():
                    square += torch.nn.utils.get_total_norm(grads).float() ** 2
            self._optimizer.step_with_ready_grads()
            self._optimizer.zero_grad()

    def grad_norm(self) -> float:
        """Return the global gradient norm, once every parameter is stepped; a collective call."""
        found = sum(part.found_inf.item() for part in self._scaled)
        assert not found, "gradients were finite when this step was allowed"
        for square, part in self._squares_of_parts():
            torch.distributed.all_reduce(square, group=part.get_grad_stats_parallel_group())
        return math.sqrt(sum(square.item() for square in self._squares))

    @contextmanager
    def _narrowed_to(self, parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
        """Remove all other parameters from the optimizer's lists inside the block."""
        kept = {id(parameter) for parameter in parameters}
        lists: list[list[Any]] = [group["params"] for group in self._groups()]
        for part in self._optimizer.chained_optimizers:
            for of_group in side_by_side(part):
                lists += of_group
                for whole, *made in zip(*of_group, strict=True):
                    kept |= {id(shard) for shard in made if id(whole) in kept}
        before = [list(entries) for entries in lists]
        try:
            for entries in lists:
                entries[:] = (entry for entry in entries if id(entry) in kept)
            yield
        finally:
            for entries, whole in zip(lists, before, strict=True):
                entries[:] = whole

    @contextmanager
    def _settings_applied(self) -> Iterator[None]:
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
    def _without_others(self) -> Iterator[None]:
        """Unscale with the iteration's loss scale; wait for no check; gather nothing."""
        with ExitStack() as undo:
            for part, scaler in zip(self._scaled, self._scalers, strict=True):
                undo.callback(setattr, part, "grad_scaler", part.grad_scaler)
                undo.callback(delattr, part, "_unscale_main_grads_and_check_for_nan")
                part.grad_scaler = scaler
                part._unscale_main_grads_and_check_for_nan = partial(_unscale, part)
            for part in self._optimizer.chained_optimizers:
                if hasattr(part, "shard_fp32_groups"):  # a DistributedOptimizer
                    undo.callback(setattr, part, "_defer_param_sync", False)
                    part._defer_param_sync = True
            yield

    def _squares_of_parts(self) -> Iterator[tuple[torch.Tensor, Any]]:
        return zip(self._squares, self._optimizer.chained_optimizers, strict=True)

    def _groups(self) -> Iterator[dict[str, Any]]:
        for part in self._optimizer.chained_optimizers:
            if not part.is_stub_optimizer:
                yield from part.optimizer.param_groups


def _unscale(part: Any) -> bool:
    """Unscale as Megatron's method does, but leave what is found to `PartialStep.grad_norm`."""
    if not part.is_stub_optimizer:
        grads = part._collect_main_grad_data_for_unscaling()
        inverse = part.grad_scaler.inv_scale
        torch._amp_foreach_non_finite_check_and_unscale_(grads, part.found_inf, inverse)
    return False


def side_by_side(part: Any) -> Iterator[tuple[list[Any], ...]]:
    """Yield the lists of each group of one of Megatron's optimizers, as `_ROWS` says."""
    for row in _ROWS:
        yield from zip(*(getattr(part, name, ()) for name in row), strict=True)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: group[key] for key in _OF_AN_ITERATION if key in group}


def _set(group: dict[str, Any], settings: dict[str, Any]) -> None:
    for key in _OF_AN_ITERATION:
        group.pop(key, None)
    group.update(settings)

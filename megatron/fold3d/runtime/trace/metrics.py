"""Our metrics for Megatron's own TensorBoard and W&B writers, such as exposed times.

Only the last rank has the writers; it reports its own values.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.fold3d.observe.trace_files import IterationTrace

_PREFIX = "fold3d/"


class Metrics:
    """Writes a recorded iteration to whichever writers this rank has.

    Args:
        tensorboard: returns the TensorBoard writer or None. It is a function, since Megatron makes
            the writer after our patches are applied.
        wandb: returns the initialized W&B module, or None.
    """

    def __init__(self, tensorboard: Callable[[], Any], wandb: Callable[[], Any]) -> None:
        self._tensorboard = tensorboard
        self._wandb = wandb

    @property
    def is_wanted(self) -> bool:
        """True if this rank has a writer."""
        return self._tensorboard() is not None or self._running_wandb() is not None

    def write(self, row: "IterationTrace") -> None:
        """Write one iteration's seconds and counts."""
        from megatron.fold3d.observe.exposure import rank_exposure  # a trace needs it, no norm

        found = {**rank_exposure(row), **row.counts}
        values = {_PREFIX + name: value for name, value in found.items()}
        if (writer := self._tensorboard()) is not None:
            for name, value in values.items():
                writer.add_scalar(name, value, row.iteration)
        if (wandb := self._running_wandb()) is not None:
            # W&B drops values of an earlier step, and Megatron may have logged a later one already.
            step = max(row.iteration, wandb.run.step)
            wandb.log({**values, f"{_PREFIX}iteration": row.iteration}, step)

    def write_grad_norm(self, norm: float, iteration: int, num_samples: int) -> None:
        """Write an iteration's gradient norm under the names that Megatron itself uses.

        ``num_samples`` is the number of samples consumed by the end of the iteration. As in
        Megatron, W&B gets nothing if there is no TensorBoard writer.
        """
        if (writer := self._tensorboard()) is None:
            return
        writer.add_scalar("grad-norm", norm, iteration)
        writer.add_scalar("grad-norm vs samples", norm, num_samples)
        if (wandb := self._running_wandb()) is not None:
            wandb.log({"grad-norm": norm}, max(iteration, wandb.run.step))

    def _running_wandb(self) -> Any:
        """Return W&B, or None once Megatron has finished its run.

        Megatron does so before the last iteration is complete here.
        """
        wandb = self._wandb()
        return None if wandb is None or wandb.run is None else wandb

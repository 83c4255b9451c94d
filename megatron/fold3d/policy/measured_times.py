"""A run's measurements of its computations, links and memory; equal on all ranks."""

from dataclasses import dataclass

from megatron.fold3d.plan.passes.place_weight_grads import HeldSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimes:
    """Seconds of one micro-batch in each stage, of a transfer and of DP.sync; bytes, if known."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    """Without recomputation and weight gradients that have their own actions in the plan."""
    recompute_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    transfer_s: float
    """One message, measured while every rank sends one to the next."""
    grad_sync_s: tuple[float, ...]
    """DP.sync of a stage's gradients."""
    rings_are_buffered: bool = False
    """Whether a message slows DP.sync down in its own direction alone."""
    held: HeldSizes | None = None
    """Bytes; None if the device does not report its memory, as on a CPU."""

    def __str__(self) -> str:
        named = {
            "F": max(self.forward_s),
            "B": max(self.backward_s),
            "R": max(self.recompute_s),
            "W": max(self.weight_s),
            "transfer": self.transfer_s,
            "DP.sync": max(self.grad_sync_s),
        }
        return ", ".join(f"{name} {s * 1e3:.3g} ms" for name, s in named.items() if s)

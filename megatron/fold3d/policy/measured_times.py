"""What a run has measured of its computations, its links and its memory, the same on all ranks."""

from dataclasses import dataclass

from megatron.fold3d.plan.passes.place_weight_grads import HeldSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTimes:
    """Seconds of one micro-batch in each stage, of a transfer, and of DP.sync; bytes if known."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    """Without what the plan has apart: recomputation and weight gradients."""
    recompute_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    transfer_s: float
    """One message, while every rank sends one to the next."""
    grad_sync_s: tuple[float, ...]
    """DP.sync of a stage's gradients."""
    held: HeldSizes | None = None
    """Bytes; None where the device does not tell, as on a CPU."""

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

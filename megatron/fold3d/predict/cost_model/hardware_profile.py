"""Measurements of a run's own hardware, and the costs of any split of the model on it.

One layer, and one transfer of each kind, are measured once. Stages are made of layers, so the costs
for every number of segments follow.
"""

import json
from dataclasses import asdict, dataclass, fields
from typing import Self

from megatron.fold3d.predict.simulator.costs import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """Seconds and bytes of a run's parts, the slowest of all ranks; all numbers are per GPU."""

    layer_forward_s: float
    """One micro-batch through one layer."""
    layer_backward_s: float
    """Including recomputation."""
    head_forward_s: float
    """What the last stage computes beside its layers, up to the loss."""
    head_backward_s: float
    message_s: float
    """One micro-batch from a rank to the next, beside its latency, all ranks sending at once."""
    message_latency_s: float
    grad_sync_s_per_byte: float
    """DP.sync of gradients, all groups at once."""
    grad_sync_latency_s: float
    layer_gradient_bytes: float
    head_gradient_bytes: float
    """Of the last stage, and of the first, whose word embeddings are as large."""
    host_copy_bytes_per_s: float
    """From the device to pinned memory of the host."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"found {field.name}={value!r}; it is a number from 0 on")

    def costs(self, num_layers: int, num_ranks: int, num_segments: int) -> Costs:
        """Return the costs of the stages of a model with equal numbers of layers per stage."""
        stages = num_ranks * num_segments
        layers, middle = num_layers / stages, (0.0,) * (stages - 1)
        return Costs(
            forward_s=tuple(
                layers * self.layer_forward_s + s for s in (*middle, self.head_forward_s)
            ),
            backward_s=tuple(
                layers * self.layer_backward_s + s for s in (*middle, self.head_backward_s)
            ),
            p2p_s=self.message_s,
            p2p_latency_s=self.message_latency_s,
            grad_sync_s=tuple(
                self.grad_sync_s(layers * self.layer_gradient_bytes + ends)
                for ends in self._ends(stages)
            ),
        )

    def grad_sync_s(self, num_bytes: float) -> float:
        """Return how long DP.sync of so many bytes takes."""
        return self.grad_sync_latency_s + num_bytes * self.grad_sync_s_per_byte

    def _ends(self, stages: int) -> list[float]:
        """Bytes of gradients beside those of layers."""
        ends = [0.0] * stages
        ends[0] = ends[-1] = self.head_gradient_bytes
        return ends

    def to_json(self) -> str:
        """One key per field; the inverse is `from_json`."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read `to_json`.

        Raises:
            ValueError: the text is something else.
        """
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise ValueError(f"not measurements: {error}") from None

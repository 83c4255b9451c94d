"""Measurements of a run's own hardware, and the costs of any split of the model on it.

One layer, the embedding, the head and one transfer of each kind are measured once. Stages are made
of layers, so the costs for every number of segments and every split of the layers follow.
"""

import json
from collections.abc import Iterator, Sequence
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
    embedding_forward_s: float
    """What the first stage computes beside its layers."""
    embedding_backward_s: float
    message_s: float
    """One micro-batch from a rank to the next, beside its latency, all ranks sending at once."""
    message_latency_s: float
    grad_sync_s_per_byte: float
    """DP.sync of gradients, all groups at once."""
    grad_sync_latency_s: float
    layer_gradient_bytes: float
    head_gradient_bytes: float
    """Of the last stage, and of the first, whose word embeddings are as large."""
    rings_are_buffered: bool = False
    """Whether a message slows DP.sync down in its own direction alone."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"found {field.name}={value!r}; it is a number from 0 on")

    def costs(self, layers: Sequence[float]) -> Costs:
        """Return the costs of the stages of a model."""
        ends = [0.0] * len(layers)
        forward_s, backward_s, gradient_bytes = [*ends], [*ends], [*ends]
        forward_s[0] += self.embedding_forward_s
        forward_s[-1] += self.head_forward_s
        backward_s[0] += self.embedding_backward_s
        backward_s[-1] += self.head_backward_s
        gradient_bytes[0] = gradient_bytes[-1] = self.head_gradient_bytes

        def of_stages(layer: float, beside: Sequence[float]) -> Iterator[float]:
            return (count * layer + more for count, more in zip(layers, beside, strict=True))

        return Costs(
            forward_s=tuple(of_stages(self.layer_forward_s, forward_s)),
            backward_s=tuple(of_stages(self.layer_backward_s, backward_s)),
            p2p_s=self.message_s,
            p2p_latency_s=self.message_latency_s,
            rings_are_buffered=self.rings_are_buffered,
            grad_sync_s=tuple(
                map(self.grad_sync_s, of_stages(self.layer_gradient_bytes, gradient_bytes))
            ),
        )

    def grad_sync_s(self, num_bytes: float) -> float:
        """Return how long DP.sync of so many bytes takes."""
        return self.grad_sync_latency_s + num_bytes * self.grad_sync_s_per_byte

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

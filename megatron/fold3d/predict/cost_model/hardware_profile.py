"""Measurements of a run's own hardware, from which the costs of any split of the model follow.

One layer, the embedding, the head and one transfer of each kind are measured once. A stage's costs
are the sum over its layers, for any number of segments.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Self

from megatron.fold3d.predict.simulator.costs import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """Seconds and bytes of a model's parts on the slowest rank; all numbers are per GPU."""

    layer_forward_s: float
    """One micro-batch through one layer."""
    layer_backward_s: float
    """One micro-batch through one layer, including recomputation."""
    head_forward_s: float
    """The last stage's computation beside its layers, up to the loss."""
    head_backward_s: float
    embedding_forward_s: float
    """The first stage's computation beside its layers."""
    embedding_backward_s: float
    message_s: float
    """One micro-batch from a rank to the next without latency, while all ranks send."""
    message_latency_s: float
    grad_sync_s_per_byte: float
    """DP.sync of gradients, while all data-parallel groups reduce."""
    grad_sync_latency_s: float
    layer_gradient_bytes: float
    head_gradient_bytes: float
    """Gradients of the head, and of the first stage's word embeddings, which are as large."""
    rings_are_buffered: bool = False
    """Whether a message slows DP.sync down only in the message's direction."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or not value >= 0:
                raise ValueError(f"found {field.name}={value!r}; it is a number from 0 on")

    def costs(self, layers: Sequence[float]) -> Costs:
        """Return the costs of a model whose stages have these numbers of layers."""
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
        """Return the seconds that DP.sync of this many bytes takes."""
        return self.grad_sync_latency_s + num_bytes * self.grad_sync_s_per_byte

    def to_json(self) -> str:
        """Return a JSON object with one key per field; the inverse is `from_json`."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read text that `to_json` has written.

        Raises:
            ValueError: the text is not JSON, or its keys or numbers are wrong.
        """
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError) as error:
            raise ValueError(f"not measurements: {error}") from None

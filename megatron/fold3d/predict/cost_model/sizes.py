"""Bytes on one GPU: parameters, gradients, optimizer, saved activations, messages.

Activations as in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (2022), for 16-bit training: per layer s b h (10 + 24/t + 5 a s/(h t)), all divided by t
with sequence parallelism; without the attention scores when those are recomputed (or never written,
as with flash attention); the layer's input alone, 2 s b h, when the whole layer is.
"""

from dataclasses import dataclass
from typing import Literal

from megatron.fold3d.predict.cost_model.model_shape import ModelShape, Split

Recompute = Literal["none", "selective", "full"]
GRADIENT_BYTES = 4  # Megatron accumulates in fp32
_MASTER_BYTES = 4  # fp32 weights, where the model's are of 16 bits
_MOMENTS_BYTES = 8  # Adam's two
_LOGIT_BYTES = 4  # the loss is computed in fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a model is trained, apart from its pipeline."""

    tensor_parallel: int = 1
    data_parallel: int = 1
    microbatch_size: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    recompute: Recompute = "none"
    fp32: bool = False
    """Instead of 16 bits."""

    def __post_init__(self) -> None:
        for field in ("tensor_parallel", "data_parallel", "microbatch_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"found {field}={getattr(self, field)}; it is at least one")

    @property
    def element_bytes(self) -> int:
        """Of weights, activations and messages."""
        return 4 if self.fp32 else 2

    @property
    def optimizer_bytes(self) -> int:
        """Of a parameter."""
        return _MOMENTS_BYTES + (0 if self.fp32 else _MASTER_BYTES)

    def check(self, shape: ModelShape) -> None:
        """Return if the model can be split in this way.

        Raises:
            ValueError: the tensor-parallel size does not divide heads, or vocabulary.
        """
        t = self.tensor_parallel
        if shape.num_attention_heads % t:
            fits = [n for n in range(1, t) if shape.num_attention_heads % n == 0]
            raise ValueError(
                f"num_attention_heads={shape.num_attention_heads} is not divisible by "
                f"tensor_parallel={t}; the nearest size that fits is {fits[-1]}"
            )


def static_bytes(shape: ModelShape, setup: Setup, num_ranks: int, split: Split) -> list[float]:
    """Return, per pipeline rank, the constant bytes of parameters, gradients and optimizer."""
    stages = shape.stage_parameters(split)
    sharded = setup.data_parallel if setup.distributed_optimizer else 1
    each = setup.element_bytes + GRADIENT_BYTES + setup.optimizer_bytes / sharded
    return [sum(stages[r::num_ranks]) / setup.tensor_parallel * each for r in range(num_ranks)]


def saved_bytes(shape: ModelShape, setup: Setup, split: Split) -> list[float]:
    """Return, per stage, what one micro-batch's forward keeps for its backward.

    The last stage of a model keeps its logits as well, whatever is recomputed.
    """
    layers = [len(layers) for layers in shape.stage_layers(split)]
    saved = [n * layer_bytes(shape, setup, setup.recompute) for n in layers]
    tokens = setup.microbatch_size * shape.seq_length
    saved[-1] += tokens * shape.vocab_size * _LOGIT_BYTES / setup.tensor_parallel
    return saved


def working_bytes(shape: ModelShape, setup: Setup) -> float:
    """Return the extra bytes of a running backward: the layer that it recomputes."""
    return layer_bytes(shape, setup, "none") if setup.recompute == "full" else 0.0


def recomputed_bytes(shape: ModelShape, setup: Setup, split: Split) -> list[float]:
    """Return, per stage, what early recomputation holds until the backward: all its layers."""
    each = layer_bytes(shape, setup, "none") if setup.recompute == "full" else 0.0
    return [len(layers) * each for layers in shape.stage_layers(split)]


def layer_bytes(shape: ModelShape, setup: Setup, recompute: Recompute) -> float:
    """Return the activations that one layer saves for one micro-batch."""
    t, sbh = setup.tensor_parallel, shape.hidden_size * shape.seq_length * setup.microbatch_size
    whole = t if setup.sequence_parallel else 1  # what is not split by tensor parallelism alone
    if recompute == "full":
        return setup.element_bytes * sbh / whole
    scores = 0.0
    if recompute == "none":
        scores = 5 * shape.num_attention_heads * shape.seq_length / shape.hidden_size
    return sbh * (10 / whole + (24 + scores) / t) * setup.element_bytes / 2


def delayed_bytes(shape: ModelShape, setup: Setup, split: Split) -> list[float]:
    """Return, per stage, what a backward keeps for its delayed weight gradients.

    These are the inputs of each layer's linears and the gradients of their outputs. Tensor
    parallelism splits the outputs of the first linear of a pair and the inputs of the second;
    sequence parallelism splits the inputs of the first as well.
    """
    h, a, f = shape.hidden_size, shape.attention_size, shape.ffn_size
    gathered, inputs, divided = 2 * h, 2 * h, (3 * a + f) + (a + f)
    if setup.sequence_parallel:
        inputs, divided = 0, divided + inputs
    tokens = setup.microbatch_size * shape.seq_length
    elements = gathered + inputs + divided / setup.tensor_parallel
    layer = tokens * elements * setup.element_bytes
    return [len(layers) * layer for layers in shape.stage_layers(split)]


def message_bytes(shape: ModelShape, setup: Setup) -> float:
    """Return what one GPU sends to the next pipeline rank per micro-batch."""
    tokens = setup.microbatch_size * shape.seq_length
    whole = setup.tensor_parallel if setup.sequence_parallel else 1
    return tokens * shape.hidden_size * setup.element_bytes / whole


def gradient_bytes(shape: ModelShape, setup: Setup, split: Split) -> list[float]:
    """Return, per stage, what one GPU syncs with its data-parallel peers."""
    return [
        parameters / setup.tensor_parallel * GRADIENT_BYTES
        for parameters in shape.stage_parameters(split)
    ]

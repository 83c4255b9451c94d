"""Bytes on one GPU: parameters, gradients, optimizer, saved activations, messages.

Activations as in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (2022), for 16-bit training: per layer s b h (10 + 24/t + 5 a s/(h t)), all divided by t
with sequence parallelism; without the attention scores when those are recomputed (or never written,
as with flash attention); the layer's input alone, 2 s b h, when the whole layer is. The 24 are 8 of
attention and 16 of a feed-forward layer as wide as 4 h: `_saved_elements` counts them for others.
"""

from collections.abc import Container
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal

from megatron.fold3d.predict.cost_model.model_shape import ModelShape, Parameters, Split

Recompute = Literal["none", "selective", "full"]
Order = Literal["tp-dp-pp", "tp-pp-dp"]
"""Which ranks are neighbours, innermost first: Megatron's, and that of --use-tp-pp-dp-mapping."""
_MASTER_BYTES = 4  # fp32 weights, where the model's are of 16 bits
_MOMENTS_BYTES = 8  # Adam's two
_LOGIT_BYTES = 4  # the loss is computed in fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model's training setup, apart from its pipeline."""

    tensor_parallel: int = 1
    data_parallel: int = 1
    microbatch_size: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    recompute: Recompute = "none"
    order: Order = "tp-dp-pp"
    fp32: bool = False
    """Instead of 16 bits."""
    context_parallel: int = 1
    """Ranks that share each sequence."""
    expert_parallel: int = 1
    """Ranks, of all replicas and parts of sequences, that share the experts of a layer."""
    expert_tensor_parallel: int = 0
    """Ranks that share each expert; as many as share other layers if zero."""
    small_gradients: bool = False
    """Gradients are summed and kept in 16 bits; otherwise in 32."""
    accumulates_in_fp32: bool = False
    """With small gradients: each replica adds its micro-batches up in 32 bits, apart from them."""
    scatters_in_fp32: bool = False
    """The distributed optimizer adds replicas up in 32 bits, behind an all-to-all."""
    gathered_bits: float = 0.0
    """Of a parameter, where all-gathers send what a step has changed; 0 is all of it."""
    optimizer_instances: int = 1
    """Groups of replicas, each of which shards the distributed optimizer's state among itself."""
    local_layers: bool = False
    """Layers are Megatron's own, in place of Transformer Engine's, whose attention keeps no scores
    and so recomputes them."""

    def __post_init__(self) -> None:
        for field in (
            *("tensor_parallel", "data_parallel", "microbatch_size"),
            *("context_parallel", "expert_parallel", "optimizer_instances"),
        ):
            if getattr(self, field) < 1:
                raise ValueError(f"found {field}={getattr(self, field)}; it is at least one")
        if self.fp32 and self.small_gradients:
            raise ValueError("found gradients of 16 bits with weights of 32; drop one of the two")
        if self.accumulates_in_fp32 and not self.small_gradients:
            raise ValueError(
                "found gradients of 32 bits that are to be added up in 32 bits, as they are; "
                "give --grad-reduce-in-bf16, or drop "
                "--ddp-param-name-patterns-for-fp32-local-accumulation"
            )

    @property
    def num_replicas(self) -> int:
        """The GPUs that hold the same parameters, other than experts."""
        return self.data_parallel * self.context_parallel

    @property
    def num_expert_replicas(self) -> int:
        """The GPUs that hold the same experts."""
        return self.num_replicas * self.tensor_parallel // prod(self.expert_ranks)

    @property
    def most_replicas(self) -> int:
        """The most GPUs that hold the same parameters, as `config.job_sizes.num_replicas`."""
        return max(self.num_replicas, self.num_expert_replicas)

    @property
    def expert_ranks(self) -> tuple[int, int]:
        """The ranks that share each expert, and the groups of such that share a layer's."""
        return self.expert_tensor_parallel or self.tensor_parallel, self.expert_parallel

    def tokens(self, shape: ModelShape) -> float:
        """Return the tokens of a micro-batch on one tensor-parallel group."""
        return self.microbatch_size * shape.seq_length / self.context_parallel

    @property
    def element_bytes(self) -> int:
        """The bytes of an element of weights, activations and messages."""
        return 4 if self.fp32 else 2

    @property
    def gradient_bytes(self) -> int:
        """The bytes of a parameter's gradient, where it is summed."""
        return 2 if self.small_gradients else 4

    @property
    def asked_recompute(self) -> Recompute:
        """What flags ask for: Transformer Engine's attention recomputes scores without a flag."""
        unasked = self.recompute == "selective" and not self.local_layers
        return "none" if unasked else self.recompute

    @property
    def optimizer_bytes(self) -> int:
        """The optimizer's bytes per parameter."""
        return _MOMENTS_BYTES + (0 if self.fp32 else _MASTER_BYTES)

    def check(self, shape: ModelShape) -> None:
        """Return if the model can be split in this way.

        Raises:
            ValueError: the tensor-parallel size does not divide heads, or vocabulary.
        """
        t, c, e = self.tensor_parallel, self.context_parallel, self.expert_parallel
        if c > 1 and shape.seq_length % (2 * c):
            raise ValueError(
                f"seq_length={shape.seq_length} is not divisible by twice "
                f"context_parallel={c}; each rank has two parts of a sequence"
            )
        if e > 1 and (not shape.num_experts or shape.num_experts % e):
            raise ValueError(
                f"num_experts={shape.num_experts} is not divisible by expert_parallel={e}; "
                "give a size that divides it"
            )
        if self.num_replicas % self.optimizer_instances:
            raise ValueError(
                f"{self.num_replicas} replicas are not divisible by "
                f"optimizer_instances={self.optimizer_instances}; give a number that divides them"
            )
        if self.num_replicas * t % prod(self.expert_ranks):
            raise ValueError(
                f"tensor_parallel={t} x data_parallel={self.data_parallel} x context_parallel={c} "
                f"is not divisible by expert_tensor_parallel={self.expert_ranks[0]} x "
                f"expert_parallel={e}; experts are shared among these ranks"
            )
        if shape.num_groups % t and t % shape.num_groups and not shape.num_attention_heads % t:
            raise ValueError(
                f"num_query_groups={shape.num_query_groups} is not divisible by "
                f"tensor_parallel={t}; give a size that divides it"
            )
        if shape.num_attention_heads % t:
            fits = [n for n in range(1, t) if shape.num_attention_heads % n == 0]
            raise ValueError(
                f"num_attention_heads={shape.num_attention_heads} is not divisible by "
                f"tensor_parallel={t}; the nearest size that fits is {fits[-1]}"
            )


@dataclass(frozen=True, slots=True)
class HeldParameters:
    """The parameters of a stage that one GPU holds."""

    dense: float
    experts: float
    """Those of experts, where other ranks hold the same than of the rest."""


def held_parameters(shape: ModelShape, setup: Setup, split: Split) -> tuple[HeldParameters, ...]:
    """Return, per stage, the parameters that Megatron builds on one GPU."""
    t, e = setup.tensor_parallel, setup.expert_parallel

    def held(n: Parameters) -> HeldParameters:
        latent = n.latent / (t if setup.local_layers else 1)
        dense = n.divided / t + n.whole + latent
        experts = (n.experts / setup.expert_ranks[0] + n.whole_experts) / e
        if setup.expert_ranks == (t, 1):  # no other ranks hold them
            return HeldParameters(dense + experts, 0.0)
        return HeldParameters(dense, experts)

    return tuple(map(held, shape.padded(t).stage_parameters(split)))


def static_bytes(
    shape: ModelShape, setup: Setup, num_ranks: int, split: Split, replicated: Container[int] = ()
) -> list[float]:
    """Return, per pipeline rank, the constant bytes of parameters, gradients and optimizer.

    Args:
        replicated: stages of which each replica has the whole optimizer, where it is distributed.
    """
    # A gradient, its sum over micro-batches, and what an all-to-all brings of it.
    gradient = setup.gradient_bytes * (1 + setup.scatters_in_fp32) + 4 * setup.accumulates_in_fp32
    whole, optimizer = setup.element_bytes + gradient, setup.optimizer_bytes
    shares = (1.0, 1.0)
    if setup.distributed_optimizer:
        instances = setup.optimizer_instances
        shares = (instances / setup.num_replicas, instances / setup.num_expert_replicas)
    stages = []
    for stage, held in enumerate(held_parameters(shape, setup, split)):
        dense, experts = (1.0, 1.0) if stage in replicated else shares
        stepped = held.dense * dense + held.experts * experts
        stages.append((held.dense + held.experts) * whole + stepped * optimizer)
    return [sum(stages[rank::num_ranks]) for rank in range(num_ranks)]


def saved_bytes(shape: ModelShape, setup: Setup, split: Split) -> list[float]:
    """Return, per stage, what one micro-batch's forward keeps for its backward.

    The last stage of a model always keeps its logits as well, even with full recomputation.
    """
    saved = shape.by_stage(partial(layer_bytes, shape, setup, setup.recompute), split)
    t = setup.tensor_parallel
    saved[-1] += setup.tokens(shape) * shape.padded(t).vocab_size * _LOGIT_BYTES / t
    return saved


def working_bytes(shape: ModelShape, setup: Setup, split: Split) -> list[float]:
    """Return, per stage, the extra bytes of a running backward: the layer that it recomputes."""
    full = setup.recompute == "full"
    return [
        max((layer_bytes(shape, setup, "none", layer) for layer in layers if full), default=0.0)
        for layers in shape.stage_layers(split)
    ]


def layer_bytes(shape: ModelShape, setup: Setup, recompute: Recompute, layer: int = 0) -> float:
    """Return the activations that one layer saves for one micro-batch."""
    t, tokens = setup.tensor_parallel, setup.tokens(shape)
    whole = t if setup.sequence_parallel else 1  # what is not split by tensor parallelism alone
    if recompute == "full":
        return setup.element_bytes * tokens * shape.hidden_size / whole
    scores = 0
    if recompute == "none":
        scores = 5 * shape.num_attention_heads * shape.seq_length
    divided = 2 * _saved_elements(shape, layer) + scores
    latent = 4 * sum(shape.latent_sizes)  # before and behind their norms, on every rank
    bytes_16 = tokens * ((10 * shape.hidden_size + latent) / whole + divided / t)
    return bytes_16 * setup.element_bytes / 2


def _saved_elements(shape: ModelShape, layer: int) -> int:
    """Elements per token that tensor parallelism divides: inputs of linears and of activations.

    Each expert that a token goes to has a copy of its input, and its output until they are summed.
    """
    width = sum(inside for _, inside in shape.ffn_sizes(layer))
    attended = shape.attention_size * (1 + shape.output_gate)  # and before its gate
    elements = attended + shape.qkv_size + (2 + shape.swiglu) * width
    if shape.num_experts_in(layer):
        elements += 2 * shape.expert_hidden_size * shape.experts_per_token
        elements += 2 * shape.moe_latent_size
    return elements


def delayed_bytes(shape: ModelShape, setup: Setup, split: Split) -> list[float]:
    """Return, per stage, what a backward keeps for its delayed weight gradients."""
    tokens = setup.tokens(shape) * setup.element_bytes
    return shape.by_stage(lambda n: tokens * _delayed_elements(shape, setup, n), split)


def _delayed_elements(shape: ModelShape, setup: Setup, layer: int) -> float:
    """Elements per token: inputs of a layer's linears and gradients of their outputs.

    Tensor parallelism splits the outputs of the first linear of a pair and the inputs of the
    second; sequence parallelism splits the inputs of the first as well. Each expert that a token
    goes to has operands of its own.
    """
    t, h = setup.tensor_parallel, shape.hidden_size
    first = t if setup.sequence_parallel else 1

    def pair(inside: float) -> float:
        """Return the elements of two linears with ``inside`` between them."""
        return h + h / first + inside / t

    attention = pair(shape.qkv_size + shape.attention_size) + 2 * sum(shape.latent_sizes)
    elements = attention * shape.num_attentions_in(layer)
    gated = 2 + shape.swiglu
    if not shape.num_experts_in(layer):
        return elements + pair(gated * shape.ffn_size)
    copies = setup.expert_ranks[0] / t  # of a token, on one rank of those that share it
    if shared := shape.shared_expert_ffn_hidden_size:
        elements += pair(gated * shared)
    if latent := shape.moe_latent_size:
        elements += 2 * (h + latent) / first
    outer = 2 * shape.expert_hidden_size * copies
    return elements + shape.experts_per_token * (outer + gated * shape.expert_ffn_size / t)


def message_bytes(shape: ModelShape, setup: Setup) -> float:
    """Return what one GPU sends to the next pipeline rank per micro-batch."""
    tokens = setup.tokens(shape)
    whole = setup.tensor_parallel if setup.sequence_parallel else 1
    return tokens * shape.hidden_size * setup.element_bytes / whole


def tensor_parallel_bytes(shape: ModelShape, setup: Setup) -> float:
    """Return what one GPU sends to its tensor-parallel group in a layer's forward of a micro-batch.

    A layer sends 8 b s h (t - 1)/t elements (Narayanan et al. 2021, Sec. 3.2), half of them then.
    """
    t = setup.tensor_parallel
    elements = 8 * setup.microbatch_size * shape.seq_length * shape.hidden_size * ((t - 1) / t)
    return elements / setup.context_parallel / 2 * setup.element_bytes


def context_bytes(shape: ModelShape, setup: Setup) -> float:
    """Return the keys and values that one GPU passes on around a ring in a layer's forward."""
    each = setup.element_bytes / setup.tensor_parallel
    return shape.key_and_value_size * setup.tokens(shape) * each * (setup.context_parallel - 1)


def expert_bytes(shape: ModelShape, setup: Setup, layer: int) -> float:
    """Return what one GPU sends to experts, and back as results, in a layer's forward."""
    e, each = setup.expert_parallel, setup.element_bytes / setup.tensor_parallel
    copies = shape.experts_per_token if shape.num_experts_in(layer) else 0
    return 2 * setup.tokens(shape) * copies * shape.expert_hidden_size * each * (e - 1) / e

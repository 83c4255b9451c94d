"""Bytes on one GPU: parameters, gradients, optimizer, saved activations, messages.

Saved activations follow Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (2022). In 16 bits a layer saves s b h (10 + 24/t + 5 a s/(h t)) bytes; sequence parallelism
divides all of it by t. The last term, attention's scores, is left out if scores are recomputed, or
never written, as in flash attention. Full recomputation saves only the layer's input, 2 s b h. The
24 are 8 for attention and 16 for a feed-forward layer of width 4 h: see `_saved_elements`.
"""

from collections.abc import Container
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal

from megatron.fold3d.predict.cost_model.model_shape import ModelShape, Parameters, Split

Recompute = Literal["none", "selective", "full"]
Order = Literal["tp-dp-pp", "tp-pp-dp"]
"""The order of ranks, innermost first: Megatron's default, or --use-tp-pp-dp-mapping."""
_MASTER_BYTES = 4  # fp32 copies of 16-bit weights
_MOMENTS_BYTES = 8  # Adam's two moments
_LOGIT_BYTES = 4  # the loss is computed in fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """All parallel sizes but the pipeline's, and precision, optimizer and recomputation."""

    tensor_parallel: int = 1
    data_parallel: int = 1
    microbatch_size: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    recompute: Recompute = "none"
    order: Order = "tp-dp-pp"
    fp32: bool = False
    """Whether training is in 32 bits instead of 16."""
    context_parallel: int = 1
    """Ranks that share each sequence."""
    expert_parallel: int = 1
    """Ranks of all data- and context-parallel ones that share the experts of a layer."""
    expert_tensor_parallel: int = 0
    """Ranks that share each expert; zero stands for the tensor-parallel size."""
    small_gradients: bool = False
    """Whether gradients are summed over replicas and kept in 16 bits; otherwise in 32."""
    accumulates_in_fp32: bool = False
    """With small gradients: each replica sums its micro-batches in a separate 32-bit buffer."""
    scatters_in_fp32: bool = False
    """The distributed optimizer sums over replicas in 32 bits, after an all-to-all."""
    gathered_bits: float = 0.0
    """Bits of a parameter in coded all-gathers; zero means that whole parameters are gathered."""
    summed_bits: float = 0.0
    """Bits of a gradient in coded sums to shards; zero means that whole gradients are summed."""
    optimizer_instances: int = 1
    """Groups of replicas; each group shards a copy of the distributed optimizer's state."""
    local_layers: bool = False
    """Whether layers are Megatron's own instead of Transformer Engine's."""
    keeps_scores: bool = False
    """Whether attention keeps its scores for a backward unless a flag asks to recompute them."""

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
        """The GPUs that hold the same parameters, experts aside."""
        return self.data_parallel * self.context_parallel

    @property
    def num_expert_replicas(self) -> int:
        """The GPUs that hold the same experts."""
        return self.num_replicas * self.tensor_parallel // prod(self.expert_ranks)

    @property
    def most_replicas(self) -> int:
        """The most GPUs that hold the same parameters; see `config.job_sizes.num_replicas`."""
        return max(self.num_replicas, self.num_expert_replicas)

    @property
    def expert_ranks(self) -> tuple[int, int]:
        """The ranks that share each expert, and the groups of them that share a layer's experts."""
        return self.expert_tensor_parallel or self.tensor_parallel, self.expert_parallel

    def tokens(self, shape: ModelShape) -> float:
        """Return the tokens of a micro-batch on one tensor-parallel group."""
        return self.microbatch_size * shape.seq_length / self.context_parallel

    @property
    def element_bytes(self) -> int:
        """The bytes of an element of weights, activations and messages."""
        return 4 if self.fp32 else 2

    @property
    def coding_flags(self) -> tuple[str, ...]:
        """Our flags with which DP.sync is coded."""
        gathers = ("--delta-param-gather auto",) if self.gathered_bits else ()
        return (*gathers, "--coded-grad-reduce auto") if self.summed_bits else gathers

    @property
    def gradient_bytes(self) -> int:
        """The bytes of a parameter's gradient, where it is summed."""
        return 2 if self.small_gradients else 4

    @property
    def summed_share(self) -> float:
        """The part of the bytes of gradients that coded sums send."""
        return self.summed_bits / 8 / self.gradient_bytes

    @property
    def asked_recompute(self) -> Recompute:
        """What flags ask for: fused attention recomputes its scores without a flag."""
        unasked = self.recompute == "selective" and not self.keeps_scores
        return "none" if unasked else self.recompute

    @property
    def optimizer_bytes(self) -> int:
        """The optimizer's bytes per parameter."""
        return _MOMENTS_BYTES + (0 if self.fp32 else _MASTER_BYTES)

    def check(self, shape: ModelShape) -> None:
        """Check that the model can be split in this way.

        Raises:
            ValueError: a parallel size does not divide heads, experts, replicas or the sequence.
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
    """Parameters of experts, if their replicas are other GPUs than the dense parameters' ones."""


def held_parameters(shape: ModelShape, setup: Setup, split: Split) -> tuple[HeldParameters, ...]:
    """Return, per stage, the parameters that Megatron builds on one GPU."""
    t, e = setup.tensor_parallel, setup.expert_parallel

    def held(n: Parameters) -> HeldParameters:
        latent = n.latent / (t if setup.local_layers else 1)
        dense = n.divided / t + n.whole + latent
        experts = (n.experts / setup.expert_ranks[0] + n.whole_experts) / e
        if setup.expert_ranks == (t, 1):  # the same GPUs replicate both
            return HeldParameters(dense + experts, 0.0)
        return HeldParameters(dense, experts)

    return tuple(map(held, shape.padded(t).stage_parameters(split)))


def static_bytes(
    shape: ModelShape, setup: Setup, num_ranks: int, split: Split, replicated: Container[int] = ()
) -> list[float]:
    """Return, per pipeline rank, the constant bytes of parameters, gradients and optimizer.

    Args:
        replicated: stages whose optimizer state is whole on each replica.
    """
    # A gradient, its 32-bit sum over micro-batches, and what all-to-alls receive; coded ones also
    # keep what they send.
    messages = setup.scatters_in_fp32 + 2 * setup.summed_share
    gradient = setup.gradient_bytes * (1 + messages) + 4 * setup.accumulates_in_fp32
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
    """Return, per stage, the bytes that one micro-batch's forward keeps for its backward.

    The last stage of a model also keeps its logits, even with full recomputation.
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
    """Return the bytes of activations that one layer saves for one micro-batch."""
    t, tokens = setup.tensor_parallel, setup.tokens(shape)
    whole = t if setup.sequence_parallel else 1  # divides what tensor parallelism does not split
    if recompute == "full":
        return setup.element_bytes * tokens * shape.hidden_size / whole
    scores = 0
    if recompute == "none":
        scores = 5 * shape.num_attention_heads * shape.seq_length
    divided = 2 * _saved_elements(shape, layer) + scores
    latent = 4 * sum(shape.latent_sizes)  # inputs and outputs of the norms, on every rank
    bytes_16 = tokens * ((10 * shape.hidden_size + latent) / whole + divided / t)
    return bytes_16 * setup.element_bytes / 2


def _saved_elements(shape: ModelShape, layer: int) -> int:
    """Return the elements per token that tensor parallelism divides: inputs of linears and GeLUs.

    Each expert of a token keeps a copy of the token's input, and the expert's output until the sum.
    """
    width = sum(inside for _, inside in shape.ffn_sizes(layer))
    attended = shape.attention_size * (1 + shape.output_gate)  # a gate keeps its input too
    elements = attended + shape.qkv_size + (2 + shape.swiglu) * width
    if shape.num_experts_in(layer):
        elements += 2 * shape.expert_hidden_size * shape.experts_per_token
        elements += 2 * shape.moe_latent_size
    return elements


def delayed_bytes(shape: ModelShape, setup: Setup, split: Split) -> list[float]:
    """Return, per stage, the bytes that a backward keeps for its delayed weight gradients."""
    tokens = setup.tokens(shape) * setup.element_bytes
    return shape.by_stage(lambda n: tokens * _delayed_elements(shape, setup, n), split)


def _delayed_elements(shape: ModelShape, setup: Setup, layer: int) -> float:
    """Return the elements per token of a layer's linear inputs and output gradients.

    Tensor parallelism splits the outputs of a pair's first linear layer and the inputs of the
    second. Sequence parallelism splits the inputs of the first too. Each expert of a token keeps
    its own operands.
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
    copies = setup.expert_ranks[0] / t  # of a token on one rank: each of an expert's ranks has one
    if shared := shape.shared_expert_ffn_hidden_size:
        elements += pair(gated * shared)
    if latent := shape.moe_latent_size:
        elements += 2 * (h + latent) / first
    outer = 2 * shape.expert_hidden_size * copies
    return elements + shape.experts_per_token * (outer + gated * shape.expert_ffn_size / t)


def message_bytes(shape: ModelShape, setup: Setup) -> float:
    """Return the bytes that one GPU sends to the next pipeline rank per micro-batch."""
    tokens = setup.tokens(shape)
    whole = setup.tensor_parallel if setup.sequence_parallel else 1
    return tokens * shape.hidden_size * setup.element_bytes / whole


def tensor_parallel_bytes(shape: ModelShape, setup: Setup) -> float:
    """Return the bytes that one GPU sends to its tensor-parallel group in a layer's forward.

    Half of a layer's 8 b s h (t - 1)/t elements are of the forward (Narayanan et al. 2021, 3.2).
    """
    t = setup.tensor_parallel
    elements = 8 * setup.microbatch_size * shape.seq_length * shape.hidden_size * ((t - 1) / t)
    return elements / setup.context_parallel / 2 * setup.element_bytes


def context_bytes(shape: ModelShape, setup: Setup) -> float:
    """Return the bytes of keys and values that one GPU sends around a ring in a layer's forward."""
    each = setup.element_bytes / setup.tensor_parallel
    return shape.key_and_value_size * setup.tokens(shape) * each * (setup.context_parallel - 1)


def expert_bytes(shape: ModelShape, setup: Setup, layer: int) -> float:
    """Return the bytes that one GPU sends to experts, and back, in a layer's forward."""
    e, each = setup.expert_parallel, setup.element_bytes / setup.tensor_parallel
    copies = shape.experts_per_token if shape.num_experts_in(layer) else 0
    return 2 * setup.tokens(shape) * copies * shape.expert_hidden_size * each * (e - 1) / e

"""Model shapes: parameters and FLOPs of every stage of a Megatron transformer.

Layers are counted from the first stage to the last. In an encoder-decoder the last layers are the
decoder's, which have cross-attention. Beside its layers the first stage holds the embedding, and
the last stage holds the final norm and the head, whether or not a layout writes its L there.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, astuple, dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

from megatron.fold3d.observe.fields import check_fields, from_file, is_file_name

Family = Literal["gpt", "bert", "encoder-decoder"]
Split = int | Sequence[int]
"""The number of equal stages that a model is cut into, or the number of layers of each stage."""
MOST_LAYERS = 10_000
# A search asks for few splits of one model, and asks for each split many times.
_per_shape = lru_cache(maxsize=1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Numbers of parameters, by the kinds of parallelism that divide them."""

    divided: int = 0
    """Divided by tensor parallelism."""
    whole: int = 0
    """Not divided: norms, the router, biases that follow a sum over tensor-parallel ranks."""
    latent: int = 0
    """Divided by tensor parallelism in Megatron's own layers, whole in Transformer Engine's."""
    experts: int = 0
    """Divided by expert parallelism and by expert tensor parallelism."""
    whole_experts: int = 0
    """Divided by expert parallelism alone: experts' biases that follow a sum over ranks."""

    def __add__(self, other: "Parameters") -> "Parameters":
        return Parameters(
            **{n: getattr(self, n) + getattr(other, n) for n in Parameters.__dataclass_fields__}
        )

    def __mul__(self, count: int) -> "Parameters":
        return Parameters(**{n: count * getattr(self, n) for n in Parameters.__dataclass_fields__})

    @property
    def total(self) -> int:
        """Parameters of all kinds."""
        return sum(astuple(self))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A transformer; the defaults describe the GPT models in Megatron's papers."""

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    _: KW_ONLY
    seq_length: int = 2048
    vocab_size: int = 51_200
    ffn_hidden_size: int | None = None
    """4 times the hidden size if None."""
    kv_channels: int = 0
    """Width of a head; zero stands for the hidden size divided by the number of heads."""
    num_decoder_layers: int = 0
    """How many of ``num_layers`` have cross-attention, as in T5."""
    family: Family = "gpt"
    untied: bool = False
    """True if the head has weights of its own instead of the embedding's."""
    num_query_groups: int = 0
    """Heads of keys and values; zero stands for the number of query heads."""
    swiglu: bool = False
    """True if the feed-forward layer is gated: three matrices instead of two."""
    rotary_base: int = 0
    """Base of rotary position embeddings; positions are learned if zero."""
    max_positions: int = 0
    """Number of learned positions; zero stands for the sequence length."""
    rms_norm: bool = False
    """True if norms are RMSNorm, without biases."""
    biases: bool = True
    """True if linear layers have biases."""
    qkv_bias: bool = False
    """True if queries, keys and values have biases where other linear layers have none."""
    qk_norm: bool = False
    """True if queries and keys are normalized: per head or, in multi-latent attention, as latent
    vectors."""
    output_gate: bool = False
    """True if another projection, as wide as the queries, gates the output of attention."""
    learned_sinks: bool = False
    """True if each head of attention has a learned term in the sum of its softmax."""
    vocab_unit: int = 128
    """Each tensor-parallel rank holds a multiple of this many rows of the vocabulary."""
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn_hidden_size: int | None = None
    """Inner width of an expert; None stands for the width of other feed-forward layers."""
    shared_expert_ffn_hidden_size: int = 0
    """Inner width of all shared experts together, which every token passes; zero means none."""
    shared_expert_gate: bool = False
    """True if a learned vector gates the output of shared experts."""
    moe_latent_size: int = 0
    """Width to which the inputs of experts are projected; zero means no projection."""
    num_dense_layers: int = 0
    """How many first layers of a model with experts have a plain feed-forward layer."""
    kv_lora_rank: int = 0
    """Width of the latent vector of keys and values; zero means no multi-latent attention."""
    q_lora_rank: int = 0
    """Width of the latent vector of queries; zero means one projection without a latent vector."""
    qk_head_dim: int = 0
    """Width of a query or key head in multi-latent attention, without its rotary part."""
    qk_pos_emb_head_dim: int = 0
    """Width of the rotary part, which all key heads of a token share."""
    v_head_dim: int = 0
    """Width of a value head in multi-latent attention."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num_attention_heads % self.num_groups:
            raise ValueError(
                f"found num_query_groups={self.num_query_groups}; give a number that divides "
                f"num_attention_heads={self.num_attention_heads}"
            )
        latent = ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        if self.is_latent != all(getattr(self, name) for name in latent):
            raise ValueError(
                f"found kv_lora_rank={self.kv_lora_rank} with "
                f"{', '.join(f'{name}={getattr(self, name)}' for name in latent)}; "
                "multi-latent attention needs all of them, other attention none"
            )
        if not bool(self.num_experts) == bool(self.experts_per_token):
            raise ValueError(
                f"found num_experts={self.num_experts} with experts_per_token="
                f"{self.experts_per_token}; give both, or none"
            )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"found experts_per_token={self.experts_per_token}; there are "
                f"{self.num_experts} experts"
            )
        if self.is_latent and self.output_gate:
            raise ValueError("found output_gate of multi-latent attention, which has none; drop it")
        if self.num_layers > MOST_LAYERS:
            raise ValueError(f"found num_layers={self.num_layers}; give {MOST_LAYERS} at most")
        if self.family not in get_args(Family):
            raise ValueError(
                f"found family={self.family!r}; it is one of {', '.join(get_args(Family))}"
            )
        if self.num_decoder_layers > self.num_layers:
            raise ValueError(
                f"found num_decoder_layers={self.num_decoder_layers}; they are among the "
                f"{self.num_layers} layers"
            )
        if not self.kv_channels and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by num_attention_heads="
                f"{self.num_attention_heads}; change one, or give kv_channels"
            )

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def expert_ffn_size(self) -> int:
        """Width of an expert."""
        given = self.expert_ffn_hidden_size
        return self.ffn_size if given is None else given

    @property
    def expert_hidden_size(self) -> int:
        """Width of an expert's input and output."""
        return self.moe_latent_size or self.hidden_size

    @property
    def is_latent(self) -> bool:
        """True if attention is multi-latent, as in DeepSeek's models."""
        return self.kv_lora_rank > 0

    @property
    def latent_sizes(self) -> tuple[int, int]:
        """Widths of the latent vectors of queries, and of keys and values with their rotary part.

        Both are zero without multi-latent attention.
        """
        return self.q_lora_rank, self.is_latent * (self.kv_lora_rank + self.qk_pos_emb_head_dim)

    @property
    def attention_size(self) -> int:
        """Width of the values of all heads together."""
        if self.is_latent:
            return self.v_head_dim * self.num_attention_heads
        if self.kv_channels:
            return self.kv_channels * self.num_attention_heads
        return self.hidden_size

    @property
    def num_groups(self) -> int:
        """Heads of keys and values."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def qkv_size(self) -> int:
        """Width of queries, keys, values and the output gate together."""
        if self.is_latent:
            return 2 * self._query_size + self.attention_size
        heads = self.num_attention_heads * (1 + self.output_gate) + 2 * self.num_groups
        return self.attention_size // self.num_attention_heads * heads

    @property
    def key_and_value_size(self) -> int:
        """Width of keys and values together."""
        return self.qkv_size - self._query_size * (1 + self.output_gate)

    @property
    def _query_size(self) -> int:
        """Width of the queries of all heads together."""
        if self.is_latent:
            return self.num_attention_heads * (self.qk_head_dim + self.qk_pos_emb_head_dim)
        return self.attention_size

    @property
    def _projections(self) -> int:
        """Elements of the matrices of one attention."""
        h = self.hidden_size
        if not self.is_latent:
            return h * (self.attention_size + self.qkv_size)
        queries = h * self._query_size
        if rank := self.q_lora_rank:
            queries = rank * (h + self._query_size)
        up = self.kv_lora_rank * (self.num_attention_heads * self.qk_head_dim + self.attention_size)
        return queries + h * self.latent_sizes[1] + up + h * self.attention_size

    @property
    def score_flops(self) -> int:
        """The FLOPs of one attention's scores and weighted sums for one sequence."""
        return 2 * self.seq_length**2 * (self._query_size + self.attention_size)

    @property
    def num_parameters(self) -> int:
        """All parameters; a tied embedding counts once. Megatron's eq. 2, plus the final norm."""
        return sum(stage.total for stage in self.stage_parameters(1))

    @property
    def embedding_parameters(self) -> int:
        """The parameters of the word embedding, or of the head."""
        return self.vocab_size * self.hidden_size

    @_per_shape
    def padded(self, tensor_parallel: int) -> "ModelShape":
        """Return the model with the vocabulary padded as Megatron pads it."""
        unit = self.vocab_unit * tensor_parallel
        return replace(self, vocab_size=-(-self.vocab_size // unit) * unit)

    @property
    def norm_size(self) -> int:
        """The parameters of a norm per element: 1 for RMSNorm, 2 for LayerNorm."""
        return 1 if self.rms_norm else 2

    def layer_parameters(self, layer: int) -> Parameters:
        """Return the parameters of a layer: weights, biases, norms."""
        norm = Parameters(whole=self.norm_size * self.hidden_size)
        attention = (norm + self._attention_parameters) * self.num_attentions_in(layer)
        return attention + norm + self._feed_forward_parameters(layer)

    @property
    def _attention_parameters(self) -> Parameters:
        h, attended = self.hidden_size, self.attention_size
        down = h * sum(self.latent_sizes)
        sinks = self.num_attention_heads * self.learned_sinks
        weights = Parameters(divided=self._projections - down + sinks, latent=down)
        last_bias = Parameters(whole=h if self.biases else 0)
        if self.is_latent:  # only the last projection has a bias
            norms = self.norm_size * (self.q_lora_rank + self.kv_lora_rank) * self.qk_norm
            return weights + last_bias + Parameters(whole=norms)
        norms = 2 * self.norm_size * (attended // self.num_attention_heads) * self.qk_norm
        biases = self.qkv_size * (self.biases or self.qkv_bias)
        return weights + last_bias + Parameters(divided=biases, whole=norms)

    def _feed_forward_parameters(self, layer: int) -> Parameters:
        h, experts = self.hidden_size, self.num_experts_in(layer)

        def split_and_whole(width: int, outer: int = h) -> tuple[int, int]:
            """Return a feed-forward layer's parameters: divided by a parallel size, and whole."""
            gated = 1 + self.swiglu
            divided = (1 + gated) * outer * width + gated * width * self.biases
            return divided, outer * self.biases

        if not experts:
            divided, whole = split_and_whole(self.ffn_size)
            return Parameters(divided=divided, whole=whole)
        of_expert, whole_of_expert = split_and_whole(self.expert_ffn_size, self.expert_hidden_size)
        shared, whole = (
            split_and_whole(width) if (width := self.shared_expert_ffn_hidden_size) else (0, 0)
        )
        router = experts * (h + self.biases) + h * (self.shared_expert_gate and shared > 0)
        if latent := self.moe_latent_size:
            router += 2 * h * latent + (h + latent) * self.biases
        return Parameters(
            divided=shared,
            whole=router + whole,
            experts=experts * of_expert,
            whole_experts=experts * whole_of_expert,
        )

    def layer_flops(self, layer: int) -> int:
        """Return the FLOPs of a layer's forward of one sequence, multiplications and additions."""
        return self.linear_flops(layer) + self.score_flops * self.num_attentions_in(layer)

    def linear_flops(self, layer: int) -> int:
        """Return the FLOPs of a layer's matrix products with weights, for one sequence's forward.

        Attention's scores and weighted sums are left out. Weight gradients take as many FLOPs.
        """
        h, s = self.hidden_size, self.seq_length
        attention = self._projections * self.num_attentions_in(layer)
        feed_forward = (2 + self.swiglu) * sum(map(prod, self.ffn_sizes(layer)))
        if experts := self.num_experts_in(layer):
            feed_forward += h * (experts + 2 * self.moe_latent_size)
        return 2 * s * (attention + feed_forward)

    def ffn_sizes(self, layer: int) -> tuple[tuple[int, int], ...]:
        """Return the outer and inner widths of the feed-forward layers that a token passes."""
        if not self.num_experts_in(layer):
            return ((self.hidden_size, self.ffn_size),)
        sizes = ((self.expert_hidden_size, self.expert_ffn_size),) * self.experts_per_token
        if shared := self.shared_expert_ffn_hidden_size:
            sizes += ((self.hidden_size, shared),)
        return sizes

    def num_experts_in(self, layer: int) -> int:
        """Return the experts of a layer, zero if it has none."""
        return self.num_experts if layer >= self.num_dense_layers else 0

    @property
    def head_flops(self) -> int:
        """Return the FLOPs of the logits of one sequence."""
        return 2 * self.seq_length * self.embedding_parameters

    @_per_shape
    def stage_flops(self, split: Split) -> tuple[int, ...]:
        """Return, per stage, the FLOPs of one sequence's forward."""
        *others, last = self.by_stage(self.layer_flops, split)
        return (*others, last + self.head_flops)

    @_per_shape
    def stage_parameters(self, split: Split) -> tuple[Parameters, ...]:
        """Return, per stage, the parameters whose gradients are reduced over replicas."""
        stages = [
            sum(map(self.layer_parameters, layers), Parameters())
            for layers in self.stage_layers(split)
        ]
        vocabulary = Parameters(divided=self.embedding_parameters)
        positions = 0 if self.rotary_base else self.max_positions or self.seq_length  # learned
        stages[0] += vocabulary + Parameters(whole=positions * self.hidden_size)
        stages[-1] += Parameters(whole=self.norm_size * self.hidden_size)
        if len(stages) > 1 or self.untied:  # tied weights are a copy of the first stage's
            stages[-1] += vocabulary
        return tuple(stages)

    def stage_layers(self, split: Split) -> tuple[range, ...]:
        """Return the layers of each stage.

        Raises:
            ValueError: the layers cannot be divided evenly, or ``split`` has another sum.
        """
        counts = self._evenly(split) if isinstance(split, int) else split
        if sum(counts) != self.num_layers:
            raise ValueError(
                f"found {sum(counts)} layers in {len(counts)} stages; the model has "
                f"{self.num_layers}"
            )
        return tuple(range(*ends) for ends in pairwise(accumulate(counts, initial=0)))

    def by_stage[N: (int, float)](self, of_layer: Callable[[int], N], split: Split) -> list[N]:
        """Return, per stage, the sum of ``of_layer``, which is called once for equal layers."""
        count = self.num_layers
        kinds = {0, min(self.num_dense_layers, count), count - self.num_decoder_layers, count}
        each: list[N] = []
        for first, behind in pairwise(sorted(kinds)):
            each += [of_layer(first)] * (behind - first)
        return [sum(each[layers.start : layers.stop]) for layers in self.stage_layers(split)]

    def _evenly(self, num_stages: int) -> list[int]:
        if num_stages < 1 or self.num_layers % num_stages:
            fits = [n for n in range(1, self.num_layers + 1) if self.num_layers % n == 0]
            nearest = min(fits, key=lambda n: abs(n - num_stages))
            raise ValueError(
                f"num_layers={self.num_layers} is not divisible by {num_stages} stages "
                f"(ranks times segments); the nearest number that fits is {nearest}"
            )
        return [self.num_layers // num_stages] * num_stages

    def num_attentions_in(self, layer: int) -> int:
        """Return the attentions of a layer, two if it has cross-attention."""
        return 1 + (layer >= self.num_layers - self.num_decoder_layers)


def _llama(name: str, layers: int, hidden: int, heads: int, ffn: int, **rest: Any) -> ModelShape:
    """Return a shape with Llama's grouped queries, rotary positions, RMSNorm and SwiGLU."""
    alike = {"num_query_groups": 8, "rotary_base": 500_000, "swiglu": True, "rms_norm": True}
    alike |= {"biases": False, "untied": True, "ffn_hidden_size": ffn}
    return ModelShape(name, layers, hidden, heads, **(alike | rest))


SHAPES = {
    shape.name: shape
    for shape in (
        # FOLD3D Table I, with the sequence length that its throughputs imply
        ModelShape("gpt3-14b", 32, 6144, 48, seq_length=1024),
        ModelShape("gpt3-18b", 40, 6144, 48, seq_length=1024),
        ModelShape("gpt3-39b", 48, 8192, 64, seq_length=1024),
        ModelShape("gpt3-81b", 64, 10240, 80, seq_length=1024),
        ModelShape("bert", 72, 7344, 48, seq_length=1024, vocab_size=30_592, family="bert"),
        ModelShape("t-nlg", 80, 4256, 28, seq_length=1024),
        ModelShape("cpm", 48, 5120, 64, seq_length=1024, vocab_size=26_240, num_decoder_layers=24,
                   family="encoder-decoder"),
        # T5-11B: Table I's 24 layers are of the encoder and again of the decoder
        ModelShape("t5", 48, 1024, 128, seq_length=1024, vocab_size=32_128, ffn_hidden_size=65_536,
                   kv_channels=128, num_decoder_layers=24, family="encoder-decoder"),
        # Megatron (SC'21) and GPT-3
        ModelShape("gpt3-175b", 96, 12288, 96),
        ModelShape("gpt-530b", 105, 20480, 128),
        ModelShape("gpt-1t", 128, 25600, 160),
        # what their makers published
        _llama("llama3-8b", 32, 4096, 32, 14336, seq_length=8192, vocab_size=128_256),
        _llama("llama3-70b", 80, 8192, 64, 28672, seq_length=8192, vocab_size=128_256),
        _llama("llama3-405b", 126, 16384, 128, 53248, seq_length=8192, vocab_size=128_256),
        _llama("mistral-7b", 32, 4096, 32, 14336, seq_length=8192, vocab_size=32_000,
               rotary_base=10_000),
        _llama("mixtral-8x7b", 32, 4096, 32, 14336, seq_length=8192, vocab_size=32_000,
               rotary_base=1_000_000, num_experts=8, experts_per_token=2),
        _llama("qwen2.5-7b", 28, 3584, 28, 18944, seq_length=8192, vocab_size=152_064,
               rotary_base=1_000_000, num_query_groups=4, qkv_bias=True),
        _llama("deepseek-v2-lite", 27, 2048, 16, 10944, seq_length=4096, vocab_size=102_400,
               qk_norm=True, rotary_base=10_000, num_query_groups=0,
               kv_lora_rank=512, qk_head_dim=128,
               qk_pos_emb_head_dim=64, v_head_dim=128, num_experts=64, experts_per_token=6,
               expert_ffn_hidden_size=1408, shared_expert_ffn_hidden_size=2816, num_dense_layers=1),
        _llama("deepseek-v3", 61, 7168, 128, 18432, seq_length=4096, vocab_size=129_280,
               qk_norm=True, rotary_base=10_000, num_query_groups=0,
               q_lora_rank=1536, kv_lora_rank=512,
               qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128, num_experts=256,
               experts_per_token=8, expert_ffn_hidden_size=2048,
               shared_expert_ffn_hidden_size=2048, num_dense_layers=3),
        # the default model of scripts/bench/compare.py
        ModelShape("testbed", 16, 256, 4, seq_length=32, vocab_size=128),
    )
}  # fmt: skip


def model_shape(name: str) -> ModelShape:
    """Return a shape by its name, from ``layers-hidden-heads[-sequence]``, or from a file.

    ``24-2048-16`` has 24 layers. A JSON or TOML file has the fields of `ModelShape`.

    Raises:
        ValueError: no shape has this name, or the file does not describe one.
    """
    if (known := SHAPES.get(name.lower())) is not None:
        return known
    if is_file_name(name):
        return from_file(Path(name), ModelShape, "model")
    if match := re.fullmatch(r"(\d+)-(\d+)-(\d+)(?:-(\d+))?", name):
        layers, hidden, heads, sequence = (int(n) if n else 2048 for n in match.groups())
        return ModelShape(name, layers, hidden, heads, seq_length=sequence)
    raise ValueError(
        f"unknown model {name!r}; choose from {', '.join(sorted(SHAPES))}, "
        "write its layers-hidden-heads such as 24-2048-16, or name a .json or .toml file"
    )

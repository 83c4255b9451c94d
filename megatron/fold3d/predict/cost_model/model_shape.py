"""Model shapes: parameters and FLOPs of every stage of a Megatron transformer.

Layers are counted from the first stage to the last; an encoder-decoder's decoder layers, which
have cross-attention, are the last ones. Beside its layers the first stage holds the embedding and
the last one the head.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from megatron.fold3d.observe.fields import check_names, check_numbers, from_file, is_file_name

Family = Literal["gpt", "bert", "encoder-decoder"]
Split = int | Sequence[int]
"""The number of equal stages that a model is cut into, or the number of layers of each stage."""
_MOST_LAYERS = 10_000
_MAY_BE_ZERO = (
    *("ffn_hidden_size", "kv_channels", "num_decoder_layers", "num_query_groups", "rotary_base"),
    *("num_experts", "experts_per_token", "expert_ffn_hidden_size"),
    *("shared_expert_ffn_hidden_size", "num_dense_layers"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A transformer; the defaults are those of the GPT models in Megatron's papers."""

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int = 2048
    vocab_size: int = 51_200
    ffn_hidden_size: int = 0
    """4 times the hidden size if zero."""
    kv_channels: int = 0
    """Hidden size over heads if zero."""
    num_decoder_layers: int = 0
    """Of ``num_layers``, those with cross-attention: T5 and its relatives."""
    family: Family = "gpt"
    untied: bool = False
    """True if the head has weights of its own instead of the embedding's."""
    num_query_groups: int = 0
    """Heads of keys and values; as many as of queries if zero."""
    swiglu: bool = False
    """True if the feed-forward layer is gated: three matrices instead of two."""
    rotary_base: int = 0
    """Of rotary position embeddings; positions are learned if zero."""
    rms_norm: bool = False
    """True if norms are RMSNorm, without biases."""
    biases: bool = True
    """True if linear layers have biases."""
    qkv_bias: bool = False
    """True if queries, keys and values have biases where other linear layers have none."""
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn_hidden_size: int = 0
    """``ffn_hidden_size`` if zero."""
    shared_expert_ffn_hidden_size: int = 0
    """Of all shared experts together, which every token passes; none if zero."""
    num_dense_layers: int = 0
    """The first layers of a model with experts that have a feed-forward layer instead."""
    kv_lora_rank: int = 0
    """Width that keys and values of multi-latent attention have in common; plain if zero."""
    q_lora_rank: int = 0
    """Likewise of queries; they are projected at once if zero."""
    qk_head_dim: int = 0
    """Of a head of multi-latent attention, without its position."""
    qk_pos_emb_head_dim: int = 0
    """Of its position, which all keys of a token share."""
    v_head_dim: int = 0
    """Of its values."""

    def __post_init__(self) -> None:
        check_numbers(self, may_be_zero=_MAY_BE_ZERO)
        check_names(self)
        for name in ("untied", "swiglu", "rms_norm", "biases", "qkv_bias"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"found {name}={value!r}; it is true or false")
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
        if self.num_layers > _MOST_LAYERS:
            raise ValueError(f"found num_layers={self.num_layers}; give {_MOST_LAYERS} at most")
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
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def is_latent(self) -> bool:
        """True if attention is multi-latent, as DeepSeek's."""
        return self.kv_lora_rank > 0

    @property
    def latent_sizes(self) -> tuple[int, int]:
        """Widths between the two projections of multi-latent attention: queries, keys and values.

        The position of a token's keys is among the latter. Both are zero for other attention.
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
        """Width of queries, keys and values together."""
        if self.is_latent:
            return 2 * self._query_size + self.attention_size
        heads = self.num_attention_heads + 2 * self.num_groups
        return self.attention_size // self.num_attention_heads * heads

    @property
    def key_and_value_size(self) -> int:
        """Width of keys and values together."""
        return self.qkv_size - self._query_size

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
        """All parameters, a shared embedding once: Megatron's eq. 2 for a GPT."""
        layers = sum(map(self.layer_parameters, range(self.num_layers)))
        embeddings = self.embedding_parameters * (1 + self.untied)
        return layers + embeddings + self.position_parameters

    @property
    def position_parameters(self) -> int:
        """Of learned position embeddings."""
        return 0 if self.rotary_base else self.seq_length * self.hidden_size

    @property
    def embedding_parameters(self) -> int:
        """The parameters of the vocabulary, at one end of the model."""
        return self.vocab_size * self.hidden_size

    def layer_parameters(self, layer: int) -> int:
        """Return the parameters of a layer: weights, biases, norms."""
        h = self.hidden_size
        vectors = 1 if self.rms_norm else 2
        norm = h * vectors
        attention = self._projections + norm
        if self.is_latent:  # norms of the two latent vectors, and a bias of the last projection
            attention += vectors * (self.q_lora_rank + self.kv_lora_rank) + h * self.biases
        else:
            attention += self.qkv_size + h if self.biases else self.qkv_size * self.qkv_bias
        attention *= 1 + self._has_cross_attention(layer)
        return attention + norm + sum(n * size for n, size in self._feed_forwards(layer))

    def layer_flops(self, layer: int) -> int:
        """Return the FLOPs of a layer's forward of one sequence, multiplications and additions."""
        return self.linear_flops(layer) + self.score_flops * (1 + self._has_cross_attention(layer))

    def linear_flops(self, layer: int) -> int:
        """Return the FLOPs of the linear layers: all but attention's scores and weighted sums.

        The gradients of these weights take as many.
        """
        h, s = self.hidden_size, self.seq_length
        attention = self._projections * (1 + self._has_cross_attention(layer))
        feed_forward = (2 + self.swiglu) * h * sum(self.ffn_sizes(layer))
        return 2 * s * (attention + feed_forward + h * self.num_experts_in(layer))

    def ffn_sizes(self, layer: int) -> tuple[int, ...]:
        """Return the widths of the feed-forward layers that a token passes."""
        if not self.num_experts_in(layer):
            return (self.ffn_size,)
        sizes = (self.expert_ffn_hidden_size or self.ffn_size,) * self.experts_per_token
        return (*sizes, *filter(None, [self.shared_expert_ffn_hidden_size]))

    def num_experts_in(self, layer: int) -> int:
        """Return the experts of a layer, zero if it has none."""
        return self.num_experts if layer >= self.num_dense_layers else 0

    def _feed_forwards(self, layer: int) -> tuple[tuple[int, int], ...]:
        """How many feed-forward layers of each size a layer has, and their parameters."""
        h, experts = self.hidden_size, self.num_experts_in(layer)

        def size(width: int) -> int:
            gated = 1 + self.swiglu
            return (1 + gated) * h * width + (gated * width + h if self.biases else 0)

        if not experts:
            return ((1, size(self.ffn_size)),)
        shared = self.shared_expert_ffn_hidden_size
        return (
            (experts, size(self.expert_ffn_hidden_size or self.ffn_size)),
            (1, h * experts),  # the router
            (1 if shared else 0, size(shared)),
        )

    @property
    def head_flops(self) -> int:
        """Return the FLOPs of the logits of one sequence."""
        return 2 * self.seq_length * self.embedding_parameters

    def stage_flops(self, split: Split) -> tuple[int, ...]:
        """Return, per stage, the FLOPs of one sequence's forward."""
        return _stage_flops(self, split)

    def stage_parameters(self, split: Split) -> tuple[int, ...]:
        """Return, per stage, the parameters whose gradients it syncs."""
        return _stage_parameters(self, split)

    def stage_expert_parameters(self, split: Split) -> tuple[int, ...]:
        """Return, per stage, those of `stage_parameters` that expert parallelism divides."""
        return _stage_expert_parameters(self, split)

    def expert_parameters(self, layer: int) -> int:
        """Return those of `layer_parameters` that expert parallelism divides."""
        if not self.num_experts_in(layer):
            return 0
        count, size = self._feed_forwards(layer)[0]
        return count * size

    def stage_layers(self, split: Split) -> tuple[range, ...]:
        """Return the layers of each stage.

        Raises:
            ValueError: they cannot be divided evenly, or there are not as many.
        """
        counts = self._evenly(split) if isinstance(split, int) else split
        if sum(counts) != self.num_layers:
            raise ValueError(
                f"found {sum(counts)} layers in {len(counts)} stages; the model has "
                f"{self.num_layers}"
            )
        return tuple(range(*ends) for ends in pairwise(accumulate(counts, initial=0)))

    def _evenly(self, num_stages: int) -> list[int]:
        if num_stages < 1 or self.num_layers % num_stages:
            fits = [n for n in range(1, self.num_layers + 1) if self.num_layers % n == 0]
            nearest = min(fits, key=lambda n: abs(n - num_stages))
            raise ValueError(
                f"num_layers={self.num_layers} is not divisible by {num_stages} stages "
                f"(ranks times segments); the nearest number that fits is {nearest}"
            )
        return [self.num_layers // num_stages] * num_stages

    def _has_cross_attention(self, layer: int) -> bool:
        return layer >= self.num_layers - self.num_decoder_layers


# A search asks for few splits of one model, and for each of them again and again.


@lru_cache(maxsize=1024)
def _stage_flops(shape: ModelShape, split: Split) -> tuple[int, ...]:
    stages = [sum(map(shape.layer_flops, layers)) for layers in shape.stage_layers(split)]
    stages[-1] += shape.head_flops
    return tuple(stages)


@lru_cache(maxsize=1024)
def _stage_parameters(shape: ModelShape, split: Split) -> tuple[int, ...]:
    stages = [sum(map(shape.layer_parameters, layers)) for layers in shape.stage_layers(split)]
    stages[0] += shape.embedding_parameters + shape.position_parameters
    if len(stages) > 1 or shape.untied:  # if tied to the first stage's, a copy of its own
        stages[-1] += shape.embedding_parameters
    return tuple(stages)


@lru_cache(maxsize=1024)
def _stage_expert_parameters(shape: ModelShape, split: Split) -> tuple[int, ...]:
    return tuple(sum(map(shape.expert_parameters, layers)) for layers in shape.stage_layers(split))


def _shape(
    name: str, layers: int, hidden: int, heads: int, *, family: Family = "gpt", **rest: Any
) -> ModelShape:
    return ModelShape(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        family=family,
        **rest,
    )


def _llama(name: str, layers: int, hidden: int, heads: int, ffn: int, **rest: Any) -> ModelShape:
    """Return a shape with what Llama and its relatives have in common."""
    alike = {"num_query_groups": 8, "rotary_base": 500_000, "swiglu": True, "rms_norm": True}
    alike |= {"biases": False, "untied": True, "ffn_hidden_size": ffn}
    return _shape(name, layers, hidden, heads, **(alike | rest))


SHAPES = {
    shape.name: shape
    for shape in (
        # FOLD3D Table I, with the sequence length that its throughputs imply
        _shape("gpt3-14b", 32, 6144, 48, seq_length=1024),
        _shape("gpt3-18b", 40, 6144, 48, seq_length=1024),
        _shape("gpt3-39b", 48, 8192, 64, seq_length=1024),
        _shape("gpt3-81b", 64, 10240, 80, seq_length=1024),
        _shape("bert", 72, 7344, 48, seq_length=1024, vocab_size=30_592, family="bert"),
        _shape("t-nlg", 80, 4256, 28, seq_length=1024),
        _shape("cpm", 48, 5120, 64, seq_length=1024, vocab_size=26_240, num_decoder_layers=24,
             family="encoder-decoder"),
        # T5-11B: Table I's 24 layers are of the encoder and again of the decoder
        _shape("t5", 48, 1024, 128, seq_length=1024, vocab_size=32_128, ffn_hidden_size=65_536,
             kv_channels=128, num_decoder_layers=24, family="encoder-decoder"),
        # Megatron (SC'21) and GPT-3
        _shape("gpt3-175b", 96, 12288, 96),
        _shape("gpt-530b", 105, 20480, 128),
        _shape("gpt-1t", 128, 25600, 160),
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
               rotary_base=10_000, num_query_groups=0, kv_lora_rank=512, qk_head_dim=128,
               qk_pos_emb_head_dim=64, v_head_dim=128, num_experts=64, experts_per_token=6,
               expert_ffn_hidden_size=1408, shared_expert_ffn_hidden_size=2816, num_dense_layers=1),
        _llama("deepseek-v3", 61, 7168, 128, 18432, seq_length=4096, vocab_size=129_280,
               rotary_base=10_000, num_query_groups=0, q_lora_rank=1536, kv_lora_rank=512,
               qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128, num_experts=256,
               experts_per_token=8, expert_ffn_hidden_size=2048,
               shared_expert_ffn_hidden_size=2048, num_dense_layers=3),
        # what scripts/bench/compare.py trains by default
        _shape("testbed", 16, 256, 4, seq_length=32, vocab_size=128),
    )
}  # fmt: skip


def model_shape(name: str) -> ModelShape:
    """Return a shape by its name, from ``layers-hidden-heads[-sequence]``, or from a file.

    ``24-2048-16`` has 24 layers. A JSON or TOML file has the fields of `ModelShape`.

    Raises:
        ValueError: no shape has this name, or the file does not describe one.
    """
    if name in SHAPES:
        return SHAPES[name]
    if is_file_name(name):
        return from_file(Path(name), ModelShape, "model")
    if match := re.fullmatch(r"(\d+)-(\d+)-(\d+)(?:-(\d+))?", name):
        layers, hidden, heads, sequence = (int(n) if n else 2048 for n in match.groups())
        return _shape(name, layers, hidden, heads, seq_length=sequence)
    raise ValueError(
        f"unknown model {name!r}; choose from {', '.join(sorted(SHAPES))}, "
        "write its layers-hidden-heads such as 24-2048-16, or name a .json or .toml file"
    )

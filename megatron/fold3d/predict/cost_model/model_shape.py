"""Model shapes: parameters and FLOPs of every stage of a Megatron transformer.

Layers are counted from the first stage to the last; an encoder-decoder's decoder layers, which
have cross-attention, are the last ones. Beside its layers the first stage holds the embedding and
the last one the head.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, get_args

from megatron.fold3d.observe.fields import check_names, check_numbers, from_file, is_file_name

Family = Literal["gpt", "bert", "encoder-decoder"]
Split = int | Sequence[int]
"""The number of equal stages that a model is cut into, or the number of layers of each stage."""
_MOST_LAYERS = 10_000


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
    """Whether the head has weights of its own instead of the embedding's."""

    def __post_init__(self) -> None:
        check_numbers(self, may_be_zero=("ffn_hidden_size", "kv_channels", "num_decoder_layers"))
        check_names(self)
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
    def attention_size(self) -> int:
        """Width of all heads together."""
        if self.kv_channels:
            return self.kv_channels * self.num_attention_heads
        return self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All parameters, a shared embedding once: Megatron's eq. 2 for a GPT."""
        positions = self.seq_length * self.hidden_size
        layers = sum(map(self.layer_parameters, range(self.num_layers)))
        return layers + self.embedding_parameters * (1 + self.untied) + positions

    @property
    def embedding_parameters(self) -> int:
        """Of the vocabulary, at one end of the model."""
        return self.vocab_size * self.hidden_size

    def layer_parameters(self, layer: int) -> int:
        """Return the parameters of a layer: weights, biases, norms."""
        h, a, f = self.hidden_size, self.attention_size, self.ffn_size
        attention = 4 * h * a + 3 * a + h + 2 * h
        feed_forward = 2 * h * f + f + h + 2 * h
        return attention * (1 + self._has_cross_attention(layer)) + feed_forward

    def layer_flops(self, layer: int) -> int:
        """Return the FLOPs of a layer's forward of one sequence, multiplications and additions."""
        scores = 4 * self.seq_length**2 * self.attention_size
        return self.linear_flops(layer) + scores * (1 + self._has_cross_attention(layer))

    def linear_flops(self, layer: int) -> int:
        """Return the FLOPs of the linear layers: all but attention's scores and weighted sums.

        The gradients of these weights take as many.
        """
        h, a, f, s = self.hidden_size, self.attention_size, self.ffn_size, self.seq_length
        return 8 * s * h * a * (1 + self._has_cross_attention(layer)) + 4 * s * h * f

    @property
    def head_flops(self) -> int:
        """Return the FLOPs of the logits of one sequence."""
        return 2 * self.seq_length * self.embedding_parameters

    def stage_flops(self, split: Split) -> tuple[int, ...]:
        """Return, per stage, the FLOPs of one sequence's forward."""
        stages = [sum(map(self.layer_flops, layers)) for layers in self.stage_layers(split)]
        stages[-1] += self.head_flops
        return tuple(stages)

    def stage_parameters(self, split: Split) -> tuple[int, ...]:
        """Return, per stage, the parameters whose gradients it syncs."""
        stages = [sum(map(self.layer_parameters, layers)) for layers in self.stage_layers(split)]
        stages[0] += self.embedding_parameters + self.seq_length * self.hidden_size
        if len(stages) > 1 or self.untied:  # if tied to the first stage's, a copy of its own
            stages[-1] += self.embedding_parameters
        return tuple(stages)

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

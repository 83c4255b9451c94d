import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fold3d.predict.cost_model.model_shape import SHAPES, ModelShape, model_shape
from megatron.fold3d.predict.cost_model.presets import AS_GPT, preset_flags, shape_flags

PAGE = Path(__file__).parents[3] / "docs" / "flags.md"
TRAINED = [
    shape for shape in SHAPES.values() if shape.name in AS_GPT or shape.family != "encoder-decoder"
]


def trained(shape: ModelShape) -> ModelShape:
    """The model that a preset builds: a GPT of CPM's size for CPM."""
    return replace(shape, num_decoder_layers=0)


@pytest.mark.parametrize("shape", TRAINED, ids=lambda shape: shape.name)
def test_megatron_parses_every_preset_as_the_planners_model(parser, shape):
    args = parser.parse_args(preset_flags(shape.name, "bert" if shape.family == "bert" else "gpt"))
    built = replace(
        trained(shape),
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        seq_length=args.seq_length,
        ffn_hidden_size=args.ffn_hidden_size,
        kv_channels=args.kv_channels or 0,
    )
    assert built == trained(shape)
    assert args.max_position_embeddings == shape.seq_length


def test_flags_of_a_shape_keep_a_width_of_zero_apart_from_one_that_is_not_given():
    shape = model_shape("2-16-2-8")
    assert "--ffn-hidden-size" not in shape_flags(shape)
    assert "--ffn-hidden-size 0" in " ".join(shape_flags(replace(shape, ffn_hidden_size=0)))


def test_a_size_is_a_preset_of_every_script():
    assert preset_flags("2-64-4-32", "gpt") == preset_flags("2-64-4-32", "bert")


@pytest.mark.parametrize(
    ("name", "family", "message"),
    [
        ("bert", "gpt", "--model-preset bert: pretrain_bert.py trains it; pretrain_gpt.py trains "),
        ("gpt3-18b", "bert", "pretrain_gpt.py trains it; pretrain_bert.py trains bert, and any "),
        ("cpm", "bert", "Megatron-core runs no encoder-decoder in a pipeline"),
        ("t5", "gpt", "--model-preset t5: Megatron-core runs no encoder-decoder in a pipeline"),
        ("gpt5", "gpt", "unknown model 'gpt5'; choose from bert, cpm, "),
    ],
)
def test_a_preset_of_another_script_is_refused(name, family, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        preset_flags(name, family)


def test_the_page_lists_the_presets_with_their_sizes():
    rows = re.findall(r"^\| `([\w.-]+)` \| ([\d-]+) \| ([\d.]+) \|$", PAGE.read_text(), re.M)
    assert rows == [
        (s.name, f"{s.num_layers}-{s.hidden_size}-{s.num_attention_heads}-{s.seq_length}",
         f"{trained(s).num_parameters / 1e9:.1f}")
        for s in TRAINED
    ]  # fmt: skip

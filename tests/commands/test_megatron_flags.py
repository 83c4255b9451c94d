import json
import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fold3d.commands.megatron_flags import Described, described, given_training
from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.predict.cost_model.model_shape import SHAPES
from megatron.fold3d.predict.cost_model.presets import preset_flags
from megatron.fold3d.predict.cost_model.sizes import Setup, layer_bytes
from megatron.fold3d.predict.search.candidates import candidates

PACKAGE = Path(__file__).parents[2] / "megatron" / "fold3d"
COST_NOTHING = Path(__file__).parents[1] / "options_that_cost_nothing.txt"
GROUPS_OF_MODEL = (
    *("transformer configuration", "network size", "mixed precision", "moe", "mla"),
    *("experimental_attention_variant", "heterogeneous architecture", "Transformer-Engine"),
    "experimental",
)
BATCH = "--global-batch-size 8"
EXPERTS = "--num-experts 4"
FLAGS = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
SCRIPT = """\
#!/bin/bash
export LAYERS=${LAYERS:-32}
HEADS=32 # comment
BATCH="128"
MODEL_ARGS=(
    --num-layers $LAYERS   # as published
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads ${HEADS}
    --group-query-attention --num-query-groups 8
    --seq-length ${1:-"8192"}
    --position-embedding-type rope --rotary-base 500000
    --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights
)
TRAINING="\\
    --global-batch-size $BATCH \\
    --bf16"
DATA+=("--vocab-size 128256")
torchrun --nproc_per_node 8 pretrain_gpt.py ${MODEL_ARGS[@]} $TRAINING "${DATA[@]}" --lr 1e-4
"""


@pytest.fixture
def given(tmp_path: Path) -> Callable[..., Described]:
    """What is read of a script, beside words that are typed."""
    file = tmp_path / "train.sh"

    def given(script: str, typed: str = "") -> Described:
        file.write_text(script)
        return given_training(Namespace(words=(typed.split(), ()), from_script=file))

    return given


def test_a_script_is_read_with_its_variables(given, tmp_path: Path):
    found = given(SCRIPT)
    shape = found.model()
    assert (shape.num_layers, shape.num_attention_heads, shape.seq_length) == (32, 32, 8192)
    assert shape.num_parameters == SHAPES["llama3-8b"].num_parameters == 8_030_261_248
    assert (found.args.global_batch_size, found.given()["fp32"]) == (128, False)
    assert found.notes() == (
        f"read from {tmp_path}/train.sh: 32 layers of 4096, 32 heads (8 of keys and values), gated "
        "feed-forward layers of 14336, sequences of 8192, a vocabulary of 128256: 8.0 billion "
        "parameters, 128 sequences per iteration, bf16",
    )


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (f"train {FLAGS} {BATCH} {EXPERTS} --moe-layer-freq $F", "--moe-layer-freq $F could not"),
        (f"for i in 1; do L=$i; done; train {FLAGS} --num-layers $L", "($i: a loop sets it); give"),
        (f"train {FLAGS} --global-batch-size $((B * 2))", "($((B*2)): of B (the script gives it"),
    ],
)
def test_what_makes_a_model_and_cannot_be_read_is_refused(given, script: str, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        given(script)
    given(script, f"{BATCH} --num-layers 2 --moe-layer-freq ([1]*2)")


def test_what_may_be_otherwise_is_said(given, tmp_path: Path):
    branch = "if [ $FAST ]; then MORE=--swiglu; fi"
    script = f"{branch}\ntrain {FLAGS} {BATCH} --lr $LR --micro-batch-size $M $MORE"
    assert given(script).notes()[2:] == (
        "not read: --lr $LR could not be read (the script gives it no value)",
        "not read: --micro-batch-size $M could not be read (the script gives it no value)",
        f"assumed: --swiglu, from branches of {tmp_path}/train.sh of which it is not known whether "
        "they are taken; those with most flags count",
    )


@pytest.mark.parametrize(
    "name", ["llama3-70b", "mixtral-8x7b", "qwen2.5-7b", "gpt3-18b", "deepseek-v3"]
)
def test_the_flags_of_a_preset_are_read_as_its_shape(name: str):
    preset = SHAPES[name]
    more = f"--global-batch-size 8 --vocab-size {preset.vocab_size}".split()
    shape = described([*preset_flags(name, "gpt"), *more]).model()
    assert shape.num_parameters == preset.num_parameters
    assert shape.stage_flops(1) == preset.stage_flops(1)


def test_models_have_the_parameters_that_their_makers_say():
    names = ("llama3-70b", "mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3")
    assert {name: SHAPES[name].num_parameters / 1e9 for name in names} == {
        "llama3-70b": pytest.approx(70.55, abs=0.01),
        "mixtral-8x7b": pytest.approx(46.70, abs=0.01),
        "deepseek-v2-lite": pytest.approx(15.71, abs=0.01),
        "deepseek-v3": pytest.approx(671.03, abs=0.01),
    }
    # Of which a token passes 12.9: the FLOPs of its matrices, without attention scores.
    mixtral = SHAPES["mixtral-8x7b"]
    flops = sum(mixtral.linear_flops(layer) for layer in range(32)) + mixtral.head_flops
    active = flops / (2 * mixtral.seq_length) + mixtral.embedding_parameters
    assert active / 1e9 == pytest.approx(12.88, abs=0.01)


def test_a_gated_layer_saves_three_matrices_widths_and_experts_one_copy_per_expert():
    llama, mixtral = SHAPES["mistral-7b"], SHAPES["mixtral-8x7b"]
    h, f, tokens = 4096, 14336, 8192
    queries, keys_and_values = h, 2 * h // 4
    per_token = 10 * h + 2 * (queries + keys_and_values + h + 3 * f)
    assert layer_bytes(llama, Setup(), "selective") == tokens * per_token
    more = 2 * (3 * f + 4 * h)  # a second expert; two inputs and outputs
    assert layer_bytes(mixtral, Setup(), "selective") == tokens * (per_token + more)


def test_multi_latent_attention_is_read_with_megatrons_defaults():
    flags = f"{FLAGS} --global-batch-size 8 --multi-latent-attention --q-lora-rank 48"
    flags += " --qk-layernorm --group-query-attention --disable-bias-linear"
    found = described(flags.split())
    shape, h, a = found.model(), 64, 4
    assert (shape.q_lora_rank, shape.kv_lora_rank, shape.num_query_groups) == (48, 32, 0)
    assert "4 heads of multi-latent attention (32 of keys and values)" in found.notes()[0]
    queries, keys_and_values = 48 * (h + a * 192), h * (32 + 64) + 32 * a * (128 + 128)
    norms = 2 * (2 * h + 48 + 32)
    feed_forward = 2 * h * 4 * h
    weights = queries + keys_and_values + a * 128 * h + feed_forward
    assert shape.layer_parameters(0).total == weights + norms
    assert shape.layer_flops(0) == 2 * 32 * weights + 2 * 32**2 * a * (192 + 128)


@pytest.mark.search
def test_the_search_keeps_context_and_expert_parallelism(fold3d):
    flags = f"{FLAGS} --global-batch-size 8 --bf16 --vocab-size 128 --num-experts 4"
    flags += " --context-parallel-size 2 --expert-model-parallel-size 4"
    code, said, _ = fold3d(f"search --cluster h100x8 --top 1 --pp 2 --tp 1 -- {flags}")
    assert code == 0
    assert "stay as they are" in said
    assert "--context-parallel-size 2 --expert-model-parallel-size 4" in said.splitlines()[-1]


def test_half_of_multi_latent_attention_is_refused():
    with pytest.raises(ValueError, match="multi-latent attention needs all of them"):
        replace(SHAPES["deepseek-v3"], v_head_dim=0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{FLAGS} {BATCH} --spec my.layers spec", "--spec: the planner does not model layers of"),
        (f"{FLAGS} {BATCH} --hybrid-override-pattern M*", "layers that are no transformer's; drop"),
        (f"{FLAGS} {BATCH} --experimental-attention-variant dsa", "not model other attention"),
        (f"{FLAGS} {BATCH} {EXPERTS} --moe-layer-freq 2", "--moe-layer-freq 2: the planner models"),
        (f"{FLAGS} {BATCH} {EXPERTS} --moe-layer-freq f()", "--moe-layer-freq f(): the planner"),
        (f"{FLAGS} {BATCH} {EXPERTS} --moe-layer-freq [1,0]", "--moe-layer-freq [1,0]: the"),
        (f"{FLAGS} {BATCH} {EXPERTS} --moe-layer-freq ([1]*40)", "it is of 40 layers, and --num-"),
        (FLAGS, "the command line has no --global-batch-size; the model and the batch are read"),
        (f"{FLAGS} --global-batch-size", "the command line has no --global-batch-size"),
        (f"{FLAGS} --global-batch-size x", "--global-batch-size: invalid int value: 'x'"),
        (f"{FLAGS} {BATCH} --mtp-num-layers 1", "--mtp-num-layers: the planner does not model the"),
    ],
)
def test_flags_that_are_not_modelled_are_refused(flags: str, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        described(flags.split())


@pytest.mark.parametrize(
    ("pattern", "dense"), [("([1]*2)", 0), ("[1]+[1]", 0), ("([0]*1+[1]*1)", 1), ("[0,1]", 1)]
)
def test_layers_with_experts_are_any_list_of_numbers(pattern: str, dense: int):
    flags = f"{FLAGS} {BATCH} {EXPERTS} --moe-layer-freq {pattern}"
    assert described(flags.split()).model().num_dense_layers == dense


def test_what_adds_parameters_is_counted():
    def added(flags: str, more: str) -> int:
        one, other = (described(f"{FLAGS} {BATCH} {words}".split()) for words in (flags, more))
        return other.model().num_parameters - one.model().num_parameters

    h, layers, heads, experts, of_expert = 64, 2, 4, 4, 96
    gated = "--quick-geglu --ffn-hidden-size 128"
    assert added("--ffn-hidden-size 128", gated) == layers * (h * 128 + 128)
    assert added("", "--attention-output-gate") == layers * (h * h + h)
    assert added("", "--softmax-type learnable") == layers * heads
    assert added("", "--use-rotary-position-embeddings") == -32 * h
    assert added("--padded-vocab-size 200", "--padded-vocab-size 201") == h
    some = f"{EXPERTS} --moe-ffn-hidden-size {of_expert} --disable-bias-linear"
    shared = f"{some} --moe-shared-expert-intermediate-size 128"
    assert added(some, f"{some} --moe-shared-expert-gate") == 0
    assert added(shared, f"{shared} --moe-shared-expert-gate") == layers * h
    narrower = experts * 2 * (h - 16) * of_expert
    assert added(some, f"{some} --moe-latent-size 16") == layers * (2 * h * 16 - narrower)


def test_a_gated_layer_of_a_narrow_model_has_megatrons_width_zero():
    narrow = f"{BATCH} --num-layers 2 --num-attention-heads 2 --seq-length 8 --hidden-size 16"
    for flags, widths in (
        ("", (64, 64)),
        ("--swiglu", (0, 0)),
        ("--swiglu --moe-ffn-hidden-size 8", (0, 8)),
        ("--ffn-hidden-size 48 --moe-ffn-hidden-size 0", (48, 0)),
    ):
        found = described(f"{narrow} {EXPERTS} {flags}".split()).model()
        assert (found.ffn_size, found.expert_ffn_size) == widths


def test_the_published_arguments_of_gpt_oss_have_its_parameters():
    flags = """--num-layers 24 --hidden-size 2880 --ffn-hidden-size 2880 --num-attention-heads 64
        --group-query-attention --num-query-groups 8 --kv-channels 64 --seq-length 4096
        --padded-vocab-size 201088 --normalization RMSNorm --untie-embeddings-and-output-weights
        --position-embedding-type rope --num-experts 32 --moe-router-topk 4 --quick-geglu
        --softmax-type learnable --window-attn-skip-freq 2 --window-size 128,0"""
    found = described(f"{flags} {BATCH}".split())
    assert found.model().num_parameters == 20_914_757_184
    assert found.notes()[1:] == ("not in these estimates: --window-size",)


@pytest.mark.newest_options
def test_every_option_that_makes_a_model_is_counted_named_or_known_to_cost_nothing(parser):
    """Megatron's next version has new options: read them, or list those that cost nothing.

    What costs nothing changes no parameters, FLOPs or memory, or does so only beside an option that
    is read.
    """
    of_model = {
        action.dest
        for group in parser._action_groups
        if group.title in GROUPS_OF_MODEL
        for action in group._group_actions
    }
    rooms = [PACKAGE / "commands", PACKAGE / "config", PACKAGE / "predict" / "cost_model"]
    sources = [path for room in rooms for path in room.glob("*.py") if path.stem != "import_config"]
    read = {word for path in sources for word in re.findall(r"\w+", path.read_text())}
    assert of_model - read == {*COST_NOTHING.read_text().split()}


def test_what_is_not_said_is_an_assumption():
    flags = f"{FLAGS} --global-batch-size 8 --fp16 --fp8-format hybrid --num-layers 4"
    notes = described(f"{flags} --tensor-model-parallel-size 2".split()).notes()
    assert [note.partition(";")[0] for note in notes[1:]] == [
        "assumed: a vocabulary of 51200",
        "assumed: fp8 and fp4 compute as fast as 16 bits",
        "assumed: the search chooses sizes anew, instead of --tensor-model-parallel-size 2",
        "assumed: --num-layers is there several times",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "no model: give --model NAME, or a training's flags behind --, or --from-script"),
        ("--model 2-64-4 -- --num-layers 2", "--model with --num-layers: both say the model"),
        ("--model 2-64-4", "--global-batch-size is missing"),
    ],
)
def test_search_takes_one_description_of_a_model(fold3d, options: str, message: str):
    assert message in fold3d.refusal(f"search --cluster h100x8 {options}")


@pytest.mark.search
def test_search_says_what_it_has_read(fold3d):
    flags = f"{FLAGS} --global-batch-size 8 --bf16 --vocab-size 128 --swiglu"
    code, printed, _ = fold3d(f"search --cluster h100x2 --top 1 -- {flags}")
    assert code == 0
    assert printed.startswith("read from the command line: 2 layers of 64, 4 heads, gated feed-for")


@pytest.mark.search
def test_of_a_script_the_search_says_what_to_append_and_what_to_drop(fold3d, tmp_path: Path):
    file = tmp_path / "train.sh"
    file.write_text(
        "PARALLEL=(\n  --tensor-model-parallel-size 1\n  --recompute-granularity full\n)\n"
        f"torchrun --nproc-per-node 8 pretrain_gpt.py {FLAGS} --global-batch-size 8 --bf16 \\\n"
        "    --vocab-size 128 --norm-epsilon 1e-6 ${PARALLEL[@]} --schedule stock\n"
    )
    search = f"search --cluster H100x2 --top 1 --tp 1 --pp 1 --from-script {file}"
    code, said, _ = fold3d(search)
    assert code == 0
    assert "chooses sizes anew" not in said
    assert said.count("yours: stock 1f1b\n") == 1
    assert json.loads(fold3d(f"{search} --json")[1])["yours"]["recompute"] == "full"
    *_, how, flags, without, last = said.splitlines()
    assert how.endswith(f", appended to those of {file}:")
    assert flags.startswith("--bf16 --tensor-model-parallel-size ")
    assert without == "and without --recompute-granularity --schedule"
    assert last == "next, on a login node: the job with these flags and --check H100x2"


@pytest.mark.parametrize(
    ("gpus", "flags", "keeps"),
    [
        ("a100x16", "", False),
        ("v100x16", "", True),
        ("a100x16", "--attention-backend unfused", True),
        ("a100x16", "--transformer-impl local", True),
    ],
)
def test_attention_that_is_not_fused_keeps_its_scores(gpus: str, flags: str, keeps: bool):
    said, hardware = described(["--model", "gpt3-18b", *flags.split()]), cluster(gpus)
    assert said.given(hardware)["keeps_scores"] == keeps
    tried = candidates(said.model(), hardware, 64, said.given(hardware))
    assert ("none" in {c.setup.recompute for c in tried}) == keeps

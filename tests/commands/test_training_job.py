"""``fold3d simulate -- FLAGS``: a training's own flags, without Megatron."""

from pathlib import Path

import pytest

from megatron.fold3d.commands import training_words
from megatron.fold3d.commands.job import codes_of
from megatron.fold3d.commands.megatron_flags import described
from megatron.fold3d.predict.cost_model.cluster import cluster
from scripts import print_megatron_flags

MODEL = "--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --bf16"
SPLIT = "--pipeline-model-parallel-size 2 --segments 4 --micro-batch-size 2 --global-batch-size 64"
JOB = f"{MODEL} {SPLIT} --transformer-impl local --overlap-grad-reduce"
FULL = "--recompute-granularity full"
SIMULATE = "simulate --cluster a100x8-100g"


def test_short_forms_say_what_flags_say(fold3d):
    found = fold3d.json(f"{SIMULATE} -- {JOB} --schedule aiao:step=next --lr 1e-4")
    other = fold3d.json(
        f"{SIMULATE} --schedule aiao:step=next --pp 2 --segments 4 --microbatches 8 "
        "--model 16-1024-16-1024 --micro-batch-size 2 --transformer-impl local"
    )
    assert found["period_s"] == other["period_s"]
    assert found["peak_bytes"] == other["peak_bytes"]
    assert found["left_out"] == []


def test_what_is_typed_overrides_a_script(fold3d, tmp_path: Path):
    script = tmp_path / "train.sh"
    script.write_text(f"python pretrain_gpt.py {JOB} --schedule aiao --lr $RATE\n")
    line = f"{SIMULATE} --from-script {script}"
    assert fold3d.out(line).startswith("aiao: 2 ranks, 4 segments, 8 micro-batches")
    out = fold3d.out(f"{line} --pp 4 --segments 2 --schedule aiao:step=next")
    assert out.startswith("aiao:step=next: 4 ranks, 2 segments, 16 micro-batches")


@pytest.mark.newest_options
def test_flags_are_those_of_the_installed_megatron():
    assert training_words.MEGATRON_FLAGS.read_text() == print_megatron_flags.printed()


def test_without_a_schedule_it_is_stocks_with_its_groups(fold3d):
    group = "--microbatch-group-size-per-virtual-pipeline-stage 8"
    chunks = JOB.replace("--segments", "--num-virtual-stages-per-pipeline-rank")
    out = fold3d.out(f"{SIMULATE} -- {chunks} {group}")
    assert out.startswith("stock breadth-first: 2 ranks, 4 segments, 8 micro-batches")

    def period_s(flags: str) -> float:
        return fold3d.json(f"{SIMULATE} -- {flags}")["period_s"]

    assert period_s(JOB.replace("--overlap-grad-reduce", "")) > period_s(JOB)
    sharded = f"{JOB} --use-distributed-optimizer"
    assert period_s(sharded) > period_s(f"{sharded} --overlap-param-gather")


def test_megatrons_own_layers_are_fused_where_training_fuses_them(fold3d, monkeypatch):
    line = f"{SIMULATE} -- {JOB} --schedule aiao:wgrad=behind@1"
    fold3d.out(line)
    monkeypatch.setattr(training_words, "has_fusion_kernel", lambda: True)
    assert "--no-gradient-accumulation-fusion" in fold3d(line)[2]


def test_only_sums_of_bf16_gradients_are_taken_to_end_in_zeros():
    args = described(("--bf16", "--no-gradient-accumulation-fusion")).args
    assert codes_of(args, cluster("a100x16-25g")).unfused
    assert not codes_of(args, cluster("v100x16-25g")).unfused  # which trains in fp16


def test_a_preset_stands_for_a_model(fold3d):
    line = f"simulate --cluster a100x64-200g -- --model-preset gpt3-18b --bf16 {SPLIT}"
    sizes = "--tensor-model-parallel-size 8 --recompute-granularity full"
    assert "stock interleaved" in fold3d.out(f"{line} {sizes}")


def test_what_is_not_simulated_is_named(fold3d):
    more = "--lazy-inter-segment --optimizer sgd --use-distributed-optimizer"
    out = fold3d.out(f"{SIMULATE} -- {JOB} --schedule aiao {more}")
    assert out.splitlines()[-1] == ("not in these estimates: --lazy-inter-segment, --optimizer")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"simulate -- {JOB}", "a model without --cluster"),
        (f"{SIMULATE} -- {SPLIT}", "the command line has no model: give --model NAME"),
        (f"{SIMULATE} -- {SPLIT} --num-layers 9", "has no --hidden-size, --num-attention-heads"),
        (f"{SIMULATE} --model 24-1024-16 -- {JOB}", "--model with --num-layers: both say"),
        (f"{SIMULATE} -- {JOB} --segmnts 2", "there is no --segmnts; did you mean --segments?"),
        (f"{SIMULATE} --segmnts 2 -- {JOB}", "unrecognized arguments: --segmnts 2; did you mean"),
        (f"{SIMULATE} --clip-grat 1 -- {JOB}", "--clip-grat 1; did you mean --clip-grad?"),
        (f"{SIMULATE} -- {JOB} --schedule aia", "'aia' is no order"),
        (f"{SIMULATE} -- {JOB} --recompute-granularity all", "invalid choice: 'all' (choose from"),
        (f"{SIMULATE} -- {JOB} --schedule aiao:recompute=early@7 {FULL}", "no segment 7"),
        (f"{SIMULATE} -- {MODEL} --global-batch-size 9", "8 replicas: each computes equally many"),
        (
            f"{SIMULATE} -- {JOB} --tensor-model-parallel-size 3",
            "take 6 GPUs for a model, and a100",
        ),
        (f"{SIMULATE} -- {JOB} --recompute-layers x", "--recompute-layers: 'x' is neither a list"),
        (f"{SIMULATE} -- {JOB} --micro-batch-size 0", "--micro-batch-size 0: it is at least one"),
        (
            f"{SIMULATE} -- {JOB} --decoder-first-pipeline-num-layers 99",
            "--decoder-first-pipeline-num-layers 99 of 16 layers: the other 1 ranks hold one",
        ),
        (
            f"{SIMULATE} -- {JOB} --lr -1 --delta-param-gather on --use-distributed-optimizer "
            "--overlap-grad-reduce --overlap-param-gather",
            "--lr -1.0 and --init-method-std 0.02: no rate is below zero",
        ),
        (
            f"{SIMULATE} -- {JOB} --microbatch-group-size-per-virtual-pipeline-stage 7",
            "64, 8 micro-batches: Megatron runs them in groups of 7, the last of 2 at least",
        ),
        (f"{SIMULATE} -- {JOB} --mtp-num-layers 1", "does not model the layers of multi-token"),
    ],
)
def test_flags_that_cannot_be_simulated_are_refused_in_a_line(fold3d, line: str, message: str):
    assert message in fold3d.refusal(line)

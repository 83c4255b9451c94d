"""What a run lacks, or cannot have, is said before anything is built: one line each."""

import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.fold3d.config.read_config import read_config
from megatron.fold3d.config.run_flags import run_problems
from megatron.fold3d.plan.ir import PlanError
from megatron.fold3d.training import launch

RUN = {
    "--num-layers": "4",
    "--hidden-size": "32",
    "--num-attention-heads": "4",
    "--seq-length": "16",
    "--max-position-embeddings": "16",
    "--micro-batch-size": "2",
    "--lr": "1e-3",
    "--eval-interval": "100",
    "--train-iters": "10",
    "--tokenizer-type": "NullTokenizer",
    "--vocab-size": "63",
    "--mock-data": "",
}
NEEDED = ["--lr", "--train-iters", "--eval-interval"]
SIZES = ["--num-layers", "--hidden-size", "--num-attention-heads"]
LENGTHS = ["--seq-length", "--max-position-embeddings"]

Problems = Callable[..., list[str]]


@pytest.fixture
def problems(parser: ArgumentParser, monkeypatch: pytest.MonkeyPatch) -> Problems:
    """What is found in a good command line with some flags left out and others added."""

    def problems(added: str = "", *, without: str = "", ranks: int = 1) -> list[str]:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        kept = {flag: value for flag, value in RUN.items() if flag not in without.split()}
        line = " ".join([*(f"{flag} {value}" for flag, value in kept.items()), added])
        return [*run_problems(parser.parse_args(line.split()))]

    return problems


def test_a_good_command_line_has_no_problem(problems: Problems) -> None:
    assert problems() == []
    assert problems("--train-samples 80 --lr-warmup-samples 8", without="--train-iters") == []
    assert problems("--skip-train", without="--lr") == []
    assert problems("--lr-warmup-iters 10 --lr-decay-iters 20") == []
    assert problems("--split 9,1", without="--mock-data") == []
    assert problems("--micro-batch-size 0 --global-batch-size 4") == []  # `size_problems` says it


@pytest.mark.parametrize("flag", NEEDED)
def test_what_a_run_needs_is_asked_for(problems: Problems, flag: str) -> None:
    (problem,) = problems(without=flag)
    assert problem.startswith(f"{flag} is missing: ")
    assert "; give " in problem


def test_a_checkpoint_brings_sizes_but_no_learning_rate(problems: Problems, tmp_path: Path) -> None:
    (tmp_path / "iter_0000002").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    without = " ".join([*SIZES, *LENGTHS])
    flags = f"--use-checkpoint-args --load {tmp_path}"
    assert problems(flags, without=without) == []
    (problem,) = problems(flags, without=f"{without} --lr")
    assert problem.startswith("--lr is missing")
    (problem,) = problems(f"--use-checkpoint-args --load {tmp_path}/none", without=without)
    assert problem == (
        f"--use-checkpoint-args without all sizes of the model: {tmp_path}/none has no "
        "latest_checkpointed_iteration.txt, so no checkpoint; give the folder that --save named"
    )


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("--global-batch-size 4", "--global-batch-size 4, 2 micro-batches: "),
        ("", "--global-batch-size 2, 1 micro-batches: "),
        ("--global-batch-size 8 --eval-global-batch-size 4", "--eval-global-batch-size 4, 2 micro"),
        ("--global-batch-size 8 --eval-global-batch-size 0", "--eval-global-batch-size 0, 0 micro"),
        (
            "--step-batch-size-schedule 0:8,1K:10 --eval-global-batch-size 8",
            "--step-batch-size-schedule 10, 5 micro-batches: Megatron runs them in groups of 4, "
            "the last of 4 at least; give a multiple of 8, or --schedule interleaved",
        ),
        (
            "--global-batch-size 8 --microbatch-group-size-per-virtual-pipeline-stage 3",
            "--microbatch-group-size-per-virtual-pipeline-stage 3: a group has a micro-batch for",
        ),
    ],
)
def test_batches_that_stocks_segments_would_stop_at_are_named(problems, flags, found):
    several = f"--pipeline-model-parallel-size 4 --segments 2 {flags}"
    for segments in ("--segments", "--num-virtual-stages-per-pipeline-rank"):
        (problem,) = problems(
            f"--schedule stock {several.replace('--segments', segments)}", ranks=4
        )
        assert problem.startswith(f"2 segments with --schedule stock and {found}")
    for runs in (f"--schedule interleaved {several}", several.replace("--segments 2", "")):
        assert problems(runs, ranks=4) == []


def test_batches_that_stocks_segments_run_are_not(problems: Problems) -> None:
    several = "--schedule stock --pipeline-model-parallel-size 4 --segments 2 --global-batch-size"
    group = "--microbatch-group-size-per-virtual-pipeline-stage"
    for batch in ("8", "32", f"20 {group} 6", "8 --eval-global-batch-size 2 --eval-iters 0"):
        assert problems(f"{several} {batch}", ranks=4) == []


TOKENIZERS = [
    ("NullTokenizer", "NullTokenizer without --vocab-size: it has no tokens of its own"),
    ("GPT2BPETokenizer --vocab-file no/v --merge-file .", "--vocab-file no/v: no such file"),
]


@pytest.mark.parametrize(("tokenizer", "problem"), TOKENIZERS)
def test_a_tokenizer_needs_its_vocabulary(problems: Problems, tokenizer: str, problem: str) -> None:
    without = "--tokenizer-type --vocab-size"
    (found,) = problems(f"--tokenizer-type {tokenizer}", without=without)
    assert problem in found
    hub = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model openai-community/gpt2"
    assert problems(hub, without=without) == []


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            "--async-save --ckpt-format torch",
            "--async-save with --ckpt-format torch: Megatron fails when it first saves; drop one "
            "of the two",
        ),
        ("--bf16 --fp16", "--bf16 with --fp16: parameters have one precision; drop one of the two"),
        ("--group-query-attention --num-query-groups 3", "3 with --num-attention-heads 4: groups"),
        ("--hidden-dropout 2", "--hidden-dropout 2.0: it is a probability"),
        (
            "--pipeline-model-parallel-layout E(t|)*2L --num-layers 8",
            "--pipeline-model-parallel-layout E(t|)*2L with --num-layers 8: it has 2 layers",
        ),
        ("--swiglu --squared-relu", "--swiglu with --squared-relu: an MLP has one activation"),
        ("--optimizer lion", "--optimizer lion: it is in the package emerging-optimizers"),
        ("--wandb-project a", "--wandb-project a without --wandb-exp-name: a run has a name"),
        ("--enable-ft-package --save . --save-interval 5", "--enable-ft-package: the package nvid"),
        ("--fault-injector-ranks 0", "--fault-injector-ranks 0: the package nvidia-resiliency-ext"),
        ("--fault-injector-num-ranks 1", "--fault-injector-num-ranks 1: the package nvidia-resil"),
        ("--full-validation", "--full-validation without --multiple-validation-sets: Megatron"),
        (
            "--multiple-validation-sets",
            "--multiple-validation-sets without --full-validation: Megatron evaluates on",
        ),
        ("--rerun-mode report_stats", "--rerun-mode report_stats: Megatron 0.19.2 has no mode"),
        (
            "--mtp-num-layers 1 --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 2",
            "--recompute-num-layers 2 with --mtp-num-layers 1 and --recompute-method uniform",
        ),
        ("--num-workers -1", "--num-workers -1: it is a number of processes"),
        ("--lr-warmup-iters 10", "--lr-warmup-iters 10 with --train-iters 10: the learning rate"),
        ("--lr-warmup-iters 9 --lr-decay-iters 5", "9 with --lr-decay-iters 5: the learning rate"),
        ("--lr-warmup-fraction 1.0", "--lr-warmup-fraction 1.0: the rest is"),
        ("--split 1,1,1,1", "--split 1,1,1,1: it is the shares"),
        ("--split half", "--split half: it is the shares"),
        ("--split 0,0,0", "--split 0,0,0: it is the shares"),
        ("--global-batch-size 5", "--global-batch-size 5 with --micro-batch-size 2 and 1 data"),
        ("--ckpt-step 4", "--ckpt-step 4 without --load"),
        (f"--save {__file__} --save-interval 5", f"{__file__} is a file, checkpoints need a"),
        (f"--save {__file__}/new --save-interval 5", f"{__file__} is a file, checkpoints need"),
        (f"--tensorboard-dir {__file__}", f"--tensorboard-dir {__file__}: {__file__} is a file"),
        (f"--data-cache-path {__file__}", f"--data-cache-path {__file__}: {__file__} is a file"),
        (f"--load {__file__}", f"--load {__file__}: it is a file; give the folder"),
        ("--load none --exit-on-missing-checkpoint", "--exit-on-missing-checkpoint: none has no"),
        ("--pretrained-checkpoint none", "--pretrained-checkpoint none: none has no"),
    ],
)
def test_a_mistake_is_one_line(problems: Problems, flags: str, problem: str) -> None:
    (found,) = problems(flags)
    assert problem in found
    assert "; " in found


@pytest.mark.parametrize(
    "flags", ["--iterations-to-skip 1 3", "--full-validation --multiple-validation-sets"]
)
def test_what_reads_data_of_one_segment_is_refused_for_several(problems, flags):
    two = f"--pipeline-model-parallel-size 2 {flags}"
    assert problems(two, ranks=2) == []
    for segments in ("--segments 2", "--num-layers-per-virtual-pipeline-stage 1"):
        (problem,) = problems(f"{two} --schedule aiao {segments}", ranks=2)
        assert problem.startswith(f"{flags.split(' --multi')[0]} with several segments: Megatron")


def test_a_split_is_for_data_that_have_no_parts(problems: Problems) -> None:
    (found,) = problems("--train-data-path a --split 9,1,0", without="--mock-data")
    assert found == "--split 9,1,0 with --train-data-path: it has its parts already; drop --split"


def test_ranks_are_a_multiple_of_those_of_a_model(problems: Problems) -> None:
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    assert problems(f"{flags} --global-batch-size 4", ranks=8) == []
    assert problems(f"{flags} --use-checkpoint-args --use-mp-args-from-checkpoint-args") == []
    (problem,) = problems(flags)  # without torchrun
    assert problem.startswith(f"1 rank with {flags}: a model takes 2 * 2 = 4 ranks; start torchrun")
    (problem,) = problems("--pipeline-model-parallel-size 4", ranks=6)
    assert problem.startswith(
        "6 ranks with --pipeline-model-parallel-size 4: a model takes 4 ranks"
    )
    (problem,) = problems("--global-batch-size 6", ranks=2)
    assert problem.endswith(
        "and 2 data-parallel replicas: each computes equally many "
        "micro-batches; give a multiple of 4"
    )


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("{}", None),
        ("{} --ckpt-step 4", None),
        ("{} --ckpt-step 6", "--ckpt-step 6: no such iteration in {}, it has 4, 8; give one that"),
        ("{}/iter_0000008", "--load {}/iter_0000008: it is one iteration, Megatron looks for a"),
        ("{}/new", None),  # the first run of a job that will be requeued
    ],
)
def test_a_checkpoint_is_where_the_flags_say(problems, tmp_path, flags, problem):
    for name in ("iter_0000004", "iter_0000008"):
        (tmp_path / name).mkdir()
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("8")
    found = problems(f"--load {flags.format(tmp_path)}")
    assert (found == []) if problem is None else (problem.format(tmp_path) in found[0])
    tracker.write_text("9")
    (found_without,) = problems(f"--load {tmp_path}")
    assert found_without.startswith(f"{tracker.name} names iteration 9: no such iteration in")
    tracker.write_text("soon")
    (unreadable,) = problems(f"--load {tmp_path}")
    assert unreadable.startswith(f"--load {tmp_path}: {tracker.name} there says 'soon'")


@pytest.mark.parametrize(
    "flags",
    [
        "--use-mp-args-from-checkpoint-args --segments 2",
        "--use-mp-args-from-checkpoint-args --segments 2 --lazy-inter-segment",
        "--use-mp-args-from-checkpoint-args --segments 2 --schedule aiao:wgrad=last@1",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
        "--lazy-inter-segment",
    ],
)
def test_segments_of_a_checkpoint_are_judged_when_it_is_read(parser, flags):
    local = "--transformer-impl local --no-gradient-accumulation-fusion"
    line = f"--schedule aiao --use-checkpoint-args --load x {local} {flags}"
    read_config(parser.parse_args(line.split()))
    with pytest.raises(ValueError, match=r"segment|layers"):
        read_config(
            parser.parse_args(line.replace("--use-checkpoint-args", "--num-layers 3").split())
        )


def test_a_misspelt_flag_is_told_the_next_one(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py"])
    assert launch.train(["--device", "cpu", "--segmentz", "2", "--qqq"], "gpt") == 2
    assert capsys.readouterr().err == (
        "pretrain_gpt.py: error: unrecognized arguments: --segmentz 2 --qqq; "
        "did you mean --segments?\n"
    )


def test_every_reason_is_given_at_once(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py"])
    words = ["--device", "cpu", "--schedule", "1f1b", "--segments", "2", "--bf16", "--fp16"]
    run = [word for flag, value in RUN.items() for word in (flag, value) if word]
    assert launch.train([*words, *run, "--pipeline-model-parallel-size", "2"], "gpt") == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.removeprefix("pretrain_gpt.py: error: ").partition(":")[0] for line in said] == [
        "2 segments with --schedule 1f1b",
        "--bf16 with --fp16",
        "1 rank with --pipeline-model-parallel-size 2",
    ]


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        ("0F0 0Q0", "rank 0: '0Q0' is not an action"),
        ("0F0 0B0", "found 1 ranks, 1 segments, 1 micro-batches, this run has 2 ranks, 1 segments"),
        ("0F0 0F1 0B0 0B1\n1B0 1F0 1F1 1B1", "deadlock: rank 0 waits at 0B0"),
        (  # rank 1 never receives what rank 0 sends last
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
            "1RECV_F0 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
            "0SEND_F1 has no 1RECV_F1 to go with it",
        ),
    ],
)
def test_a_plan_file_is_verified_before_megatron_prints_its_flags(
    parser: ArgumentParser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, plan: str, problem: str
) -> None:
    path = tmp_path / "my.plan"
    path.write_text(plan)
    monkeypatch.setenv("WORLD_SIZE", "4")
    words = [word for pair in RUN.items() for word in pair if word]
    flags = f"--schedule plan={path} --pipeline-model-parallel-size 2 --global-batch-size 8"
    args = parser.parse_args([*words, "--device", "cpu", *flags.split()])
    args.world_size = 4
    with pytest.raises(PlanError, match=re.escape(f"{path}: ")) as raised:
        launch.check(args, run_problems(args))
    assert problem in str(raised.value)

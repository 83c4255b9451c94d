"""What ``--schedule auto`` accepts, and what it may choose."""

from argparse import ArgumentParser

import pytest

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.config.read_config import read_config

MODEL = (
    "--num-layers 12 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --device cpu "
    "--max-position-embeddings 32 --micro-batch-size 2 --pipeline-model-parallel-size 2 "
    "--schedule auto --attention-dropout 0 --hidden-dropout 0 --transformer-impl local"
)
SPLITS = "--no-gradient-accumulation-fusion"
REDUCE = "--segments 3 --overlap-grad-reduce"
ZERO = f"{REDUCE} --use-distributed-optimizer --overlap-param-gather"


def config(parser: ArgumentParser, line: str) -> Fold3DConfig:
    return read_config(parser.parse_args(f"{MODEL} {line}".split()))


@pytest.mark.parametrize(
    ("line", "keys"),
    [
        ("", set()),
        (f"{REDUCE} {SPLITS}", {"step", "wgrad"}),
        (f"{REDUCE} --log-params-norm", set()),
        (ZERO, {"optimizer"}),
        (f"{ZERO} {SPLITS} --optimizer sgd", {"wgrad"}),
        (f"--segments auto --overlap-grad-reduce {SPLITS}", {"step", "wgrad"}),
    ],
)
def test_flags_say_what_may_be_chosen(parser: ArgumentParser, line: str, keys: set[str]):
    found = config(parser, line)
    assert found.auto == keys
    assert found.choice.order == "auto"
    assert not found.keeps_forwards
    assert config(parser, f"{line} --hidden-dropout 0.1").keeps_forwards
    assert config(parser, f"{line} --deterministic-mode").keeps_sums
    assert not config(parser, f"{line} --schedule interleaved").auto


def test_a_default_in_the_word_is_not_among_the_choices(parser: ArgumentParser):
    for line, part in (
        (f"{REDUCE} {SPLITS}", "step=end"),
        (f"{REDUCE} {SPLITS}", "wgrad=backward"),
        (ZERO, "optimizer=sharded"),
    ):
        key = part.partition("=")[0]
        assert key in config(parser, line).auto
        assert key not in config(parser, f"{line} --schedule auto:{part}").auto


def test_sums_of_more_than_two_replicas_are_cut_unless_results_have_to_be_stocks(
    parser: ArgumentParser,
):
    free, exact = config(parser, REDUCE), config(parser, f"{REDUCE} --deterministic-mode")
    assert [free.may_cut_sums(replicas) for replicas in (1, 2, 4)] == [False, True, True]
    assert [exact.may_cut_sums(replicas) for replicas in (1, 2, 4)] == [False, True, False]


def test_stocks_groups_are_accepted(parser: ArgumentParser):
    grouped = "--microbatch-group-size-per-virtual-pipeline-stage 3"
    assert config(parser, f"{REDUCE} {grouped}").choice.group == 3


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("--schedule auto:ahead=2", "ahead=2 with --schedule auto: only 1f1b"),
        (
            f"{SPLITS} --schedule auto:wgrad=last@1,2",
            "wgrad=last@1,2 with --schedule auto: it chooses",
        ),
        ("--schedule auto:step=next", "step=next with --schedule auto: it chooses"),
        (f"{SPLITS} --offload-activations on", "--offload-activations on with --schedule auto"),
        ("--preemptive-comm", "--preemptive-comm with --schedule auto: never shown"),
        ("--lazy-inter-segment", "--lazy-inter-segment with --schedule auto"),
        ("--schedule auto:slices=on", "slices=on with --schedule auto"),
        (
            "--recompute-layers auto --activation-memory-bytes 999999",
            "--recompute-layers auto with --schedule auto: it compares",
        ),
        (
            f"{ZERO} --schedule auto:optimizer=replicated@1 --untie-embeddings-and-output-weights",
            "optimizer=replicated@1 with --schedule auto: it chooses",
        ),
        (f"{ZERO} --shard-segments weights", "--shard-segments weights with --schedule auto"),
        (
            "--microbatch-group-size-per-virtual-pipeline-stage 1",
            "--microbatch-group-size-per-virtual-pipeline-stage 1 with --schedule auto",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_its_fix(parser: ArgumentParser, line: str, found: str):
    with pytest.raises(ValueError, match=f"^{found}") as raised:
        config(parser, f"{REDUCE} {line}")
    (problem,) = str(raised.value).splitlines()
    assert "; " in problem

"""What ``--schedule auto`` accepts, and what it may choose."""

import pytest

from megatron.fold3d.commands.job import setup_of
from megatron.fold3d.config.read_config import read_config

MORE = (
    "--num-layers 12 --device cpu "
    "--schedule auto --attention-dropout 0 --hidden-dropout 0 --transformer-impl local"
)
SPLITS = "--no-gradient-accumulation-fusion"
REDUCE = "--segments 3 --overlap-grad-reduce"
ZERO = f"{REDUCE} --use-distributed-optimizer --overlap-param-gather"


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
def test_flags_say_what_may_be_chosen(config, line: str, keys: set[str]):
    found = config(line)
    assert found.auto == keys
    assert found.choice.order == "auto"
    assert not found.keeps_forwards
    assert config(f"{line} --deterministic-mode").keeps_sums
    assert not config(f"{line} --schedule interleaved").auto


@pytest.mark.parametrize(
    "flags",
    [
        "--attention-dropout 0.1",
        "--hidden-dropout 0.1",
        "--num-experts 4 --moe-input-jitter-eps 0.1",
        "--num-experts 4 --moe-router-force-load-balancing",
        "--num-experts 4 --moe-router-force-biased 0",
        "--fp8-format hybrid --fp8-recipe tensorwise",
    ],
)
def test_forwards_that_draw_keep_stocks_order(config, flags: str):
    assert config(flags).keeps_forwards


def test_a_default_in_the_word_is_not_among_the_choices(config):
    for line, part in (
        (f"{REDUCE} {SPLITS}", "step=end"),
        (f"{REDUCE} {SPLITS}", "wgrad=backward"),
        (ZERO, "optimizer=sharded"),
    ):
        key = part.partition("=")[0]
        assert key in config(line).auto
        assert key not in config(f"{line} --schedule auto:{part}").auto


WHOLE = "--num-experts 4 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1"


@pytest.mark.parametrize(
    ("flags", "data_parallel", "replicas"),
    [
        ("", 1, 1),
        ("", 2, 2),
        ("", 4, 4),
        ("--context-parallel-size 2", 2, 4),
        (WHOLE, 1, 2),  # of each expert
        (WHOLE, 2, 4),
        (f"{WHOLE} --expert-model-parallel-size 2", 2, 2),
        (f"{WHOLE} --context-parallel-size 2", 2, 8),
        ("--num-experts 4 --expert-tensor-parallel-size 2", 2, 2),  # of all but experts
        (WHOLE.replace("--num-experts 4", ""), 2, 2),
    ],
)
def test_sums_of_more_than_two_replicas_are_cut_unless_results_have_to_be_stocks(
    parse, flags: str, data_parallel: int, replicas: int
):
    for exactly, most in (("", 8), ("--deterministic-mode", 2)):
        args = parse(f"{REDUCE} {flags} {exactly}")
        args.data_parallel_size = data_parallel
        found = read_config(args)
        assert found.num_replicas == replicas == setup_of(args, data_parallel).most_replicas
        assert found.may_cut_sums is (1 < replicas <= most)


def test_bits_of_sums_are_known_before_the_batch_is(parse):
    """With --segments auto; Megatron's batch is then one micro-batch of each pipeline."""
    args = parse(f"{ZERO} --bf16 --schedule aiao --coded-grad-reduce on")
    args.data_parallel_size = 2
    args.global_batch_size = None
    args.gradient_accumulation_fusion = False
    assert setup_of(args, 2).summed_bits < 12


def test_stocks_groups_are_accepted(config):
    grouped = "--microbatch-group-size-per-virtual-pipeline-stage 3"
    assert config(f"{REDUCE} {grouped}").choice.group == 3


def test_forwards_ahead_are_not_for_auto(refused):
    refused(f"{REDUCE} --schedule auto:ahead=2", "^ahead=2 with --schedule auto: only 1f1b")

"""What ``--delay-weight-grads`` accepts."""

from argparse import ArgumentError, ArgumentParser
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path

import pytest

from megatron.fold3d.config.fold3d_config import Fold3DConfig

MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --pipeline-model-parallel-size 2"
)
AIAO = "--schedule aiao --segments 4 --transformer-impl local --no-gradient-accumulation-fusion"
ENGINE = "--schedule aiao --segments 4 --delay-weight-grads 1 --transformer-impl transformer_engine"
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def config(parser: ArgumentParser, line: str) -> Fold3DConfig:
    return Fold3DConfig.from_args(parser.parse_args(f"{MODEL} {line}".split()))


def test_segments_are_read_in_any_order(parser: ArgumentParser):
    assert config(parser, AIAO).delay_weight_grads == ()
    assert config(parser, f"{AIAO} --delay-weight-grads 2,1").delay_weight_grads == (1, 2)


LOCAL = "--transformer-impl local --no-gradient-accumulation-fusion"


def test_auto_may_split_every_segment(parser: ArgumentParser):
    auto = config(parser, f"{AIAO} --delay-weight-grads auto --most-activations 9")
    assert (auto.delay_weight_grads, auto.auto_weight_grads) == ((0, 1, 2, 3), True)
    assert auto.most_activations == 9
    for line in (
        "--delay-weight-grads 1 --most-activations 9",
        "--delay-weight-grads auto --most-activations 0",
    ):
        with pytest.raises(ValueError, match=r"--most-activations .: it limits .*; give both"):
            config(parser, f"{AIAO} {line}")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("--delay-weight-grads 1", "1 with --schedule stock"),
        (f"{AIAO} --delay-weight-grads 1,4", "1,4: there is no segment 4, a rank holds 4"),
        (f"{AIAO} --delay-weight-grads -1", "there is no segment -1"),
        (f"{AIAO} --segments auto --delay-weight-grads 1", "1 with --segments auto"),
        (f"{AIAO} --segments auto --delay-weight-grads auto", "auto with --segments auto"),
        ("--schedule zb-h1 --delay-weight-grads auto " + LOCAL, "auto with --schedule zb-h1"),
        ("--delay-weight-grads auto", "auto with --schedule stock"),
        (
            f"{AIAO} --delay-weight-grads 1 --transformer-impl inference_optimized",
            "1 with --transformer-impl inference_optimized",
        ),
        (f"{ENGINE} --tp-comm-overlap --sequence-parallel", "1 with --tp-comm-overlap"),
        (
            f"{ENGINE} --use-transformer-engine-op-fuser",
            "1 with --use-transformer-engine-op-fuser",
        ),
        (f"{ENGINE} --mtp-use-repeated-layer", "1 with --mtp-use-repeated-layer"),
        (
            f"{ENGINE} --overlap-dispatch-backward-with-experts-wgrad",
            "1 with --overlap-dispatch-backward-with-experts-wgrad",
        ),
        (f"{ENGINE} --num-experts 4", "1 with --num-experts 4 and biases"),
        (f"{ENGINE} --offload-activations on", "1 with --offload-activations on"),
        (f"{AIAO} --delay-weight-grads 1 --num-experts 4", "1 with --num-experts 4"),
        (
            f"{AIAO} --delay-weight-grads 1 --offload-activations on",
            "1 with --offload-activations on",
        ),
        (
            "--schedule aiao --segments 4 --transformer-impl local --delay-weight-grads 1",
            "1 with fused weight gradients",
        ),
    ],
)
def test_flags_that_delayed_weight_grads_exclude_are_refused_with_a_fix(
    parser: ArgumentParser, line: str, found: str
):
    with pytest.raises(ValueError, match=f"--delay-weight-grads .*{found}|{found}") as raised:
        config(parser, line)
    _, reason = str(raised.value).split(": ", 1)
    assert "; " in reason


def test_transformer_engine_splits_fused_backwards_and_experts(parser: ArgumentParser):
    for more in ("", "--num-experts 4 --moe-grouped-gemm --disable-bias-linear"):
        found = config(parser, f"{ENGINE} {more}")
        assert (found.delay_weight_grads, found.has_engine_modules) == ((1,), True)


DEFERS = f"{AIAO} --overlap-grad-reduce --delay-weight-grads 1,2,3"


def test_dp_sync_that_may_be_deferred_starts_early_where_it_is_asked_for(parser: ArgumentParser):
    found = config(parser, f"{DEFERS} --backward-share auto --early-dp-sync 3,2")
    assert found.early_dp_sync == (2, 3)
    assert config(parser, DEFERS).early_dp_sync == ()
    shards = f"{DEFERS} --use-distributed-optimizer --overlap-param-gather --early-dp-sync 1"
    assert config(parser, shards).early_dp_sync == (1,)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (f"{DEFERS} --early-dp-sync 3", "3 without --backward-share or"),
        (
            f"{DEFERS.replace('--segments 4', '').replace('1,2,3', '0')} --early-dp-sync 0 "
            "--use-distributed-optimizer --overlap-param-gather",
            "0 with --use-distributed-optimizer and one segment",
        ),
        (f"{DEFERS} --backward-share 1 --early-dp-sync 0,3", "0,3 with --delay-weight-grads 1,2,3"),
        (f"{AIAO} --backward-share 1 --early-dp-sync 3", "3 with --delay-weight-grads not given"),
        (
            f"{AIAO} --delay-weight-grads auto --backward-share 1 --early-dp-sync 3",
            "3 with --delay-weight-grads auto",
        ),
        (
            f"{DEFERS} --backward-share auto --early-dp-sync 3 --use-distributed-optimizer",
            "3 with --backward-share and --use-distributed-optimizer",
        ),
        (
            f"{AIAO} --delay-weight-grads 3 --early-dp-sync 3 --use-distributed-optimizer",
            "3 without --overlap-grad-reduce",
        ),
        (
            f"{DEFERS} --early-dp-sync 3 --use-distributed-optimizer",
            "3 with --use-distributed-optimizer: it needs a plan",
        ),
        (
            f"{DEFERS} --backward-share auto --early-dp-sync 3 --preemptive-comm",
            "3 with --preemptive-comm: DP.sync",
        ),
    ],
)
def test_early_dp_sync_is_refused_with_a_fix_where_it_cannot_be(
    parser: ArgumentParser, line: str, found: str
):
    with pytest.raises(ValueError, match=f"--early-dp-sync {found}.*; (drop|name|add)"):
        config(parser, line)


def test_an_old_transformer_engine_is_refused(
    parser: ArgumentParser, monkeypatch: pytest.MonkeyPatch
):
    for version, is_refused in (("2.7.0", True), ("2.8.0+abc", False), ("2.11.1", False)):
        monkeypatch.setattr(metadata, "version", lambda _, version=version: version)
        with (
            pytest.raises(ValueError, match=r"Transformer Engine 2\.7: its split .* from 2\.8 on;")
            if is_refused
            else nullcontext()
        ):
            config(parser, ENGINE)


def test_zero_bubble_splits_the_backwards_of_its_segment(parser: ArgumentParser):
    assert config(parser, f"--schedule zb-h1 {LOCAL}").delay_weight_grads == (0,)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (
            f"--schedule zb-h1 {LOCAL} --transformer-impl inference_optimized",
            "with --transformer-impl",
        ),
        ("--schedule zb-h2 --transformer-impl local", "with fused weight gradients"),
        (f"--schedule zb-h1 {LOCAL} --num-experts 4", "with --num-experts 4"),
        (f"--schedule zb-h1 {LOCAL} --offload-activations on", "with --offload-activations on"),
        (f"--schedule zb-h1 {LOCAL} --delay-weight-grads 0", "it has all weight gradients apart"),
    ],
)
def test_zero_bubble_refuses_what_splits_no_backward(parser: ArgumentParser, line: str, found: str):
    with pytest.raises(ValueError, match="--schedule zb-h") as raised:
        config(parser, line)
    (problem,) = str(raised.value).splitlines()
    assert found in problem
    assert "; " in problem


@pytest.mark.parametrize(("text", "reason"), [("3-4", "not a list of segments"), ("1,1", "twice")])
def test_delay_weight_grads_refuses_text_that_is_no_list_of_segments(
    parser: ArgumentParser, text: str, reason: str
):
    with pytest.raises((ArgumentError, SystemExit)):
        config(parser, f"{AIAO} --delay-weight-grads {text}")


def test_compatibility_page_lists_what_delayed_weight_grads_exclude():
    page = PAGE.read_text()
    for option in (
        *("--transformer-impl", "--gradient-accumulation-fusion", "--num-experts"),
        *("--tp-comm-overlap", "--use-transformer-engine-op-fuser", "--mtp-use-repeated-layer"),
        *("--overlap-dispatch-backward-with-experts-wgrad", "--disable-bias-linear"),
    ):
        assert option in page.split("## With `--delay-weight-grads`")[1]

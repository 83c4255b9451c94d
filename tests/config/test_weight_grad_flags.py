"""What ``wgrad=`` accepts."""

from contextlib import nullcontext
from importlib import metadata

import pytest

AIAO = "--schedule aiao --segments 4 --transformer-impl local --no-gradient-accumulation-fusion"
ENGINE = "--schedule aiao:wgrad=last@1 --segments 4 --transformer-impl transformer_engine"


LOCAL = "--transformer-impl local --no-gradient-accumulation-fusion"


def test_auto_may_split_every_segment(config):
    auto = config(f"{AIAO} --schedule aiao:wgrad=gaps:held=9")
    assert (auto.apart, auto.auto) == ((0, 1, 2, 3), {"wgrad"})
    assert auto.choice.held == 9
    for word in ("aiao:wgrad=last@1:held=9", "aiao:wgrad=gaps:held=0"):
        with pytest.raises(ValueError, match=r"held=.: it limits .*; give both"):
            config(f"{AIAO} --schedule {word}")


def test_transformer_engine_splits_fused_backwards_and_experts(config):
    for more in ("", "--num-experts 4 --moe-grouped-gemm --disable-bias-linear"):
        found = config(f"{ENGINE} {more}")
        assert (found.apart, found.has_engine_modules) == ((1,), True)


REDUCE = f"{AIAO} --overlap-grad-reduce"
ZERO, PREEMPTS = "--use-distributed-optimizer", "--preemptive-comm"
SHARDS = f"{REDUCE} {ZERO}"


def test_weight_grads_are_behind_their_own_backwards_where_the_word_says(config):
    carried = "aiao:step=next:wgrad=behind@2,3:wgrad=last@1"
    found = config(f"{REDUCE} --schedule {carried}")
    assert (found.apart, found.choice.where(wgrad="behind")) == ((1, 2, 3), (2, 3))
    shards = f"{SHARDS} --overlap-param-gather --schedule aiao:wgrad=behind@1:wgrad=last@2"
    assert config(shards).choice.where(wgrad="behind") == (1,)
    one = f"{SHARDS} --segments 1 --overlap-param-gather --schedule aiao:wgrad=behind"
    assert config(one).choice.where(wgrad="behind") == (0,)
    whole = config(f"{REDUCE} --schedule aiao:wgrad=behind@1,2")
    assert (whole.apart, whole.choice.where(wgrad="behind")) == ((1, 2), (1, 2))


def test_an_old_transformer_engine_is_refused(config, monkeypatch: pytest.MonkeyPatch):
    for version, is_refused in (("2.7.0", True), ("2.8.0+abc", False), ("2.11.1", False)):
        monkeypatch.setattr(metadata, "version", lambda _, version=version: version)
        with (
            pytest.raises(ValueError, match=r"Transformer Engine 2\.7: its split .* from 2\.8 on;")
            if is_refused
            else nullcontext()
        ):
            config(ENGINE)


@pytest.mark.parametrize(
    ("word", "flags", "found"),
    [
        ("aiao:wgrad=last@1,4", AIAO, "there is no segment 4, a rank holds 4"),
        ("aiao:wgrad=last@1", f"{AIAO} --segments auto", "with --segments auto"),
        ("aiao:wgrad=gaps", f"{AIAO} --segments auto", "with --segments auto"),
        ("aiao:step=next:wgrad=behind@3", SHARDS, "with step=next and --use-distributed-optimizer"),
        ("aiao:wgrad=behind@3", SHARDS, "with --use-distributed-optimizer: it needs a plan"),
        ("aiao:wgrad=behind@3", f"{AIAO} {ZERO}", "without --overlap-grad-reduce"),
        ("aiao:wgrad=behind@3", f"{REDUCE} --deterministic-mode", "with --deterministic-mode: DP"),
        ("aiao:step=next:wgrad=behind@3", f"{REDUCE} {PREEMPTS}", f"with {PREEMPTS}: DP.sync"),
    ],
)
def test_weight_grads_that_cannot_be_where_the_word_says_are_refused_with_a_fix(
    refused, word, flags, found
):
    refused(f"{flags} --schedule {word}", f"{word.rpartition(':')[2]}.*{found}.*; ", alone=False)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (f"zb-h1 {LOCAL} --transformer-impl inference_optimized", "with --transformer-impl"),
        ("zb-h2 --transformer-impl local", "with fused weight gradients"),
    ],
)
def test_zero_bubble_refuses_what_splits_no_backward(refused, line: str, found: str):
    refused(f"--schedule {line}", f"--schedule zb-h.*{found}")

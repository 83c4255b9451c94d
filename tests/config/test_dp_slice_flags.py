"""When the plan has slices of DP.sync, and what ``slices=on`` refuses."""

from argparse import ArgumentParser

import pytest

from megatron.fold3d.config.read_config import read_config

MODEL = "--num-layers 8 --schedule aiao --pipeline-model-parallel-size 2"
SHARE = "--overlap-grad-reduce --schedule aiao:step=next"


@pytest.mark.parametrize(
    ("flags", "connections", "sliced"),
    [
        (SHARE, "1", True),
        (f"{SHARE} --use-distributed-optimizer", "1", True),
        (SHARE, "8", False),
        (SHARE, "", False),
        ("--overlap-grad-reduce", "1", False),
        (f"{SHARE} --device cpu", "1", False),
        (f"{SHARE}:slices=off", "1", False),
        (f"{SHARE}:slices=on --device cpu", "", True),
        ("--overlap-grad-reduce --schedule aiao:slices=on", "", True),
    ],
)
def test_auto_slices_what_one_queue_would_stop_computation_for(
    parser: ArgumentParser,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    connections: str,
    sliced: bool,
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    config = read_config(parser.parse_args(f"{MODEL} {flags}".split()))
    assert bool(config.choice.slices) is sliced
    assert config.features.receives_late is (connections == "1" and config.device == "cuda")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            "--overlap-grad-reduce --schedule stock:slices=on",
            "slices=on with --schedule stock: only a plan has slices of DP.sync; drop it, or "
            "give --schedule aiao",
        ),
        (
            "--schedule aiao:slices=on",
            "slices=on without --overlap-grad-reduce: Megatron then reduces all gradients at the "
            "end of the iteration; add --overlap-grad-reduce",
        ),
        (
            "--overlap-grad-reduce --preemptive-comm --schedule aiao:slices=on",
            "--preemptive-comm with slices=on: its scheduler decides when slices start; drop "
            "one of the two",
        ),
    ],
)
def test_what_cannot_be_sliced_is_refused(parser: ArgumentParser, flags: str, problem: str) -> None:
    args = parser.parse_args(f"{MODEL} {flags}".split())
    with pytest.raises(ValueError) as refused:  # noqa: PT011  # the whole text is compared
        read_config(args)
    assert str(refused.value) == problem

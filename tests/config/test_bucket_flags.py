"""Which runs cut every segment into buckets."""

from argparse import ArgumentParser

import pytest

from megatron.fold3d.config.read_config import read_config

OVERLAP = "--num-layers 8 --schedule aiao --overlap-grad-reduce"
ZERO = f"{OVERLAP} --use-distributed-optimizer"


@pytest.mark.parametrize(
    ("flags", "cuts"),
    [
        ("--num-layers 8 --schedule aiao", False),
        (OVERLAP, True),
        (f"{OVERLAP} --no-align-grad-reduce", True),
        (ZERO, False),
    ],
)
def test_segments_are_cut_where_no_checkpoint_depends_on_it(
    parser: ArgumentParser, flags: str, cuts: bool
) -> None:
    args = parser.parse_args(flags.split())
    assert read_config(args).cuts_every_segment is cuts


@pytest.mark.parametrize(
    ("device", "connections", "cuts"),
    [("cuda", "1", False), ("cuda", "8", True), ("cuda", None, True), ("cpu", "1", True)],
)
def test_nothing_is_cut_where_all_streams_share_one_hardware_queue(
    parser: ArgumentParser,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    connections: str | None,
    cuts: bool,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if connections is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    args = parser.parse_args(f"{OVERLAP} --device {device}".split())
    assert read_config(args).cuts_every_segment is cuts


@pytest.mark.parametrize("flags", ["", "--no-align-param-gather"])
def test_the_plan_gathers_parameters_whatever_stock_aligns(
    parser: ArgumentParser, flags: str
) -> None:
    args = parser.parse_args(f"{ZERO} --overlap-param-gather {flags}".split())
    assert read_config(args).job.gathers_params
    assert not read_config(parser.parse_args(ZERO.split())).job.gathers_params


@pytest.mark.parametrize(
    ("flags", "early"),
    [
        (OVERLAP, True),
        ("--num-layers 8 --schedule aiao", False),
        (f"{ZERO} --overlap-param-gather", True),
        (ZERO, False),
        (f"{OVERLAP} --deterministic-mode", False),
        (f"{OVERLAP} --preemptive-comm", False),
    ],
)
def test_dp_sync_starts_between_weight_gradients_where_it_is_an_all_reduce_of_megatrons_groups(
    parser: ArgumentParser, flags: str, early: bool
) -> None:
    args = parser.parse_args(f"{flags} --device cpu".split())
    assert read_config(args).job.reduces_early is early


@pytest.mark.parametrize(("device", "ahead"), [("cpu", 3), ("cuda", 1)])
def test_receives_are_further_ahead_only_without_a_gpu(
    parser: ArgumentParser, device: str, ahead: int
) -> None:
    args = parser.parse_args(f"{OVERLAP} --device {device}".split())
    assert read_config(args).job.receives_ahead == ahead

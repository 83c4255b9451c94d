"""Which runs cut every segment into buckets, and what their plan starts early."""

import pytest

MORE = "--schedule aiao"
OVERLAP = "--overlap-grad-reduce"
ZERO = f"{OVERLAP} --use-distributed-optimizer"
GATHERS = f"{ZERO} --overlap-param-gather"


@pytest.mark.parametrize(
    ("flags", "connections", "cuts"),
    [
        ("", None, False),
        (OVERLAP, None, True),
        (f"{OVERLAP} --no-align-grad-reduce", None, True),
        (ZERO, None, False),  # a checkpoint depends on it
        (OVERLAP, "1", False),  # all streams share the one queue
        (OVERLAP, "8", True),
        (f"{OVERLAP} --device cpu", "1", True),
    ],
)
def test_segments_are_cut_where_no_checkpoint_depends_on_it_and_streams_have_queues(
    config, monkeypatch, flags, connections, cuts
):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if connections is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    assert config(flags).cuts_every_segment is cuts


@pytest.mark.parametrize(
    ("flags", "gathers"),
    [(GATHERS, True), (f"{GATHERS} --no-align-param-gather", True), (ZERO, False)],
)
def test_the_plan_gathers_parameters_whatever_stock_aligns(config, flags: str, gathers: bool):
    assert config(flags).job.gathers_params is gathers


@pytest.mark.parametrize(
    ("flags", "early"),
    [
        (OVERLAP, True),
        ("", False),
        (GATHERS, True),
        (ZERO, False),
        (f"{OVERLAP} --deterministic-mode", False),
        (f"{OVERLAP} --preemptive-comm", False),
    ],
)
def test_dp_sync_starts_between_weight_gradients_where_it_is_an_all_reduce_of_megatrons_groups(
    config, flags, early
):
    assert config(f"{flags} --device cpu").job.reduces_early is early


@pytest.mark.parametrize(("device", "ahead"), [("cpu", 3), ("cuda", 1)])
def test_receives_are_further_ahead_only_without_a_gpu(config, device: str, ahead: int):
    assert config(f"{OVERLAP} --device {device}").job.receives_ahead == ahead

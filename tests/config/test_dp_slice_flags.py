"""When the plan has slices of DP.sync."""

import pytest

MORE = "--schedule aiao"
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
    config, monkeypatch: pytest.MonkeyPatch, flags: str, connections: str, sliced: bool
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    found = config(flags)
    assert bool(found.choice.slices) is sliced
    assert found.job.receives_late is (connections == "1" and found.device == "cuda")

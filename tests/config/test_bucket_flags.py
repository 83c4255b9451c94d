"""Which runs cut every segment into buckets, and DP.sync into slices: it depends on queues."""

from operator import attrgetter

import pytest

from tests.config.conftest import Configure

MORE = "--schedule aiao"
OVERLAP = "--overlap-grad-reduce"
ZERO = f"{OVERLAP} --use-distributed-optimizer"
SHARE = f"{OVERLAP} --schedule aiao:step=next"


@pytest.mark.parametrize(
    ("flags", "connections", "field", "is_so"),
    [
        # Where no checkpoint depends on it, and all streams do not share the one queue.
        ("", None, "cuts_every_segment", False),
        (OVERLAP, None, "cuts_every_segment", True),
        (f"{OVERLAP} --no-align-grad-reduce", None, "cuts_every_segment", True),
        (ZERO, None, "cuts_every_segment", False),  # a checkpoint depends on it
        (OVERLAP, "1", "cuts_every_segment", False),
        (OVERLAP, "8", "cuts_every_segment", True),
        (f"{OVERLAP} --device cpu", "1", "cuts_every_segment", True),
        # One queue would stop computation for DP.sync in a later iteration.
        (SHARE, "1", "choice.slices", True),
        (f"{SHARE} --use-distributed-optimizer", "1", "choice.slices", True),
        (SHARE, "8", "choice.slices", False),
        (SHARE, "", "choice.slices", False),
        (OVERLAP, "1", "choice.slices", False),
        (f"{SHARE} --device cpu", "1", "choice.slices", False),
        (f"{SHARE}:slices=off", "1", "choice.slices", False),
        (f"{SHARE}:slices=on --device cpu", "", "choice.slices", True),
        (f"{OVERLAP} --schedule aiao:slices=on", "", "choice.slices", True),
        (OVERLAP, "1", "job.receives_late", True),
        (OVERLAP, "8", "job.receives_late", False),
        (f"{OVERLAP} --device cpu", "1", "job.receives_late", False),
    ],
)
def test_queues_decide_what_is_cut_and_when_receives_are_posted(
    config: Configure,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    connections: str | None,
    field: str,
    is_so: bool,
) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if connections is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    assert bool(attrgetter(field)(config(flags))) is is_so

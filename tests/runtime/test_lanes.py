"""What a lane takes is a line through two sizes of messages, on a clock that the test sets."""

from types import SimpleNamespace

import pytest
import torch

from megatron.fold3d.policy.measured_times import Line
from megatron.fold3d.runtime.measure import lanes, timing
from megatron.fold3d.runtime.measure.lanes import Send

CPU = torch.device("cpu")
FAST, SLOW = Line(1e-10, 2e-5), Line(4e-8, 1e-3)  # 10 GB/s and 25 MB/s


class Lane:
    """Messages that take what a line says, on a device that takes a while to synchronize."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, line: Line) -> None:
        self.now_s, self.sizes = 0.0, list[int]()
        self._line = line
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now_s))
        monkeypatch.setattr(timing, "synchronize", lambda _: self._pass(3e-5))
        monkeypatch.setattr(lanes, "slowest", lambda values, _: values)

    def sending(self, num_bytes: int) -> Send:
        self.sizes.append(num_bytes)
        return lambda: self._pass(self._line.seconds(num_bytes))

    def _pass(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.mark.parametrize("expected", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("largest", [1 << 11, 1 << 20, 1 << 30])
def test_two_sizes_give_latency_and_seconds_a_byte(
    monkeypatch: pytest.MonkeyPatch, expected: Line, largest: int
):
    found = lanes.line(Lane(monkeypatch, expected).sending, largest, CPU)
    assert found.s_per_byte == pytest.approx(expected.s_per_byte, rel=1e-6)
    assert found.latency_s == pytest.approx(expected.latency_s, rel=1e-6)  # without synchronize


@pytest.mark.parametrize(
    ("line", "largest", "sizes"),
    [
        (FAST, 1 << 30, [1 << 16, 1 << 19, 1 << 22, 1 << 25]),  # no more memory than that
        (SLOW, 1 << 30, [1 << 16, 1 << 19]),  # the second takes 22 ms
        (FAST, 600_000, [75_000, 600_000]),
        (FAST, 4096, [512, 4096]),
    ],
)
def test_messages_grow_to_the_runs_own_until_one_takes_long_enough(
    monkeypatch: pytest.MonkeyPatch, line: Line, largest: int, sizes: list[int]
):
    lane = Lane(monkeypatch, line)
    lanes.line(lane.sending, largest, CPU)
    assert lane.sizes == sizes


def test_noise_gives_neither_a_negative_latency_nor_an_endless_rate(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(lanes, "slowest", lambda values, _: values)
    monkeypatch.setattr(lanes, "seconds", lambda *_: 5e-3)  # of one message and of five
    assert lanes.message_s(lambda: None, CPU) == 1e-3
    assert Line.through((1, 2e-3), (10, 1e-3)).s_per_byte == pytest.approx(1e-4)
    assert Line.through((8, 1e-6), (16, 9e-6)).latency_s == 0

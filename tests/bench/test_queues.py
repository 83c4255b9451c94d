"""The queue test tells one hardware queue from many, on a device that has either."""

import time

import pytest

from scripts.bench import queues, simulated_queues
from tests.gpu_path.late_device import Delays, LateDevice

IN_TIME = Delays(share=0)


class Device(LateDevice):
    """As ``torch.cuda``, whose kernels may be a sleep: here 1 ms is 2 million cycles."""

    def _sleep(self, cycles: int) -> None:
        self.current_stream().launch(lambda: time.sleep(cycles / 2e9))

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()


@pytest.mark.parametrize("timed", [False, True], ids=["kernel", "event"])
@pytest.mark.parametrize(
    ("num_queues", "verdict"), [(1, "it waited"), (32, "it did not wait")], ids=["one", "many"]
)
def test_one_queue_is_told_from_many(num_queues: int, verdict: str, timed: bool) -> None:
    device = Device(IN_TIME, num_queues)
    device.is_queued = True  # no operator runs on the host, so a stream is entered at once
    # On a busy machine a thread may be late, but never early.
    tries = [queues.times_ms(device, timed=timed) for _ in range(3)]
    assert queues.verdict(*min(tries, key=lambda ms: ms[1] / ms[0])) == verdict


def test_without_a_gpu_the_queue_test_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert queues.main([]) == 2
    assert "error: torch sees no GPU" in capsys.readouterr().err


@pytest.mark.search
def test_slices_in_one_queue_are_no_preemption() -> None:
    for sharded in (False, True):
        _, _, *seconds = simulated_queues.preemption("gpt3-39b", 100, sharded=sharded)
        slices, gives_way, many, preempts, tp_sync = map(float, seconds)
        assert min(slices, gives_way) > max(many, preempts)
        assert tp_sync == 150

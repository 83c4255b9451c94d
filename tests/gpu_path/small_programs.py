"""Small programs on the late device, for faults that training would not show."""

import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.fold3d.observe.trace_files import IterationTrace
from megatron.fold3d.runtime.preemption.communicator import extension
from megatron.fold3d.runtime.preemption.preemptive_group import PreemptiveGroup
from megatron.fold3d.runtime.trace.recorder import Recorder
from tests.distributed import RankError, run_distributed
from tests.gpu_path import late_device
from tests.gpu_path.late_device import HANG_S, Delays
from tests.gpu_path.late_training import Late, lateness
from tests.gpu_path.mutations import Mutation, mutate
from tests.gpu_path.queued_operators import QueuedOperators


def trace_early(mutation: Mutation | None) -> list[str]:
    """Trace two iterations of which the second begins before the first is over.

    Megatron's loop waits for much between two iterations, and no trace is read too early there.
    """
    delivered: list[IterationTrace] = []
    late = Late(delays=Delays(longest_s=0.02, always="compute"))
    recorder = Recorder(torch.device("cpu"), lambda _: True, delivered.append)
    with lateness(late) as device, mutate(mutation) if mutation else nullcontext():
        for number in (1, 2):
            try:
                with recorder.iteration(number), recorder.span("0F0", "compute"):
                    device.queue_operator(lambda: time.sleep(0.01))
            except AssertionError:
                return ["AssertionError: the time of an event that has not passed is read"]
        early = len(delivered)
        device.compute.synchronize()
        recorder.close()
    wrong = [] if not early else [f"{early} iterations are delivered before they are over"]
    spans_s = [event.end_s - event.start_s for trace in delivered for event in trace.events]
    return wrong + [f"spans take {spans_s} s"] * (len(spans_s) != 2 or min(spans_s) < 0.01)


def fill_a_queue(mutation: Mutation | None) -> list[str]:
    """Launch more than a queue holds behind a receive that a send of ours makes possible."""
    try:
        run_distributed(_receive_and_go_on, 1, mutation, grace_s=0.5)
    except RankError as error:
        return [str(error)]
    return []


class _Echo:
    """A peer that answers a message with one of its own."""

    def __init__(self) -> None:
        self.receives, self._heard = threading.Event(), threading.Event()

    def send(self, *_: Any) -> None:
        self._heard.set()

    def recv(self, tensors: list[torch.Tensor], *_: Any) -> None:
        self.receives.set()
        assert self._heard.wait(HANG_S)
        tensors[0].fill_(1.0)


def _receive_and_go_on(mutation: Mutation | None) -> None:
    late = Late(delays=Delays(share=0.0), launches=64)
    dist.init_process_group("gloo")
    with (
        pytest.MonkeyPatch.context() as patch,
        mutate(mutation) if mutation else nullcontext(),
        lateness(late) as device,
    ):
        patch.setattr(late_device, "STANDS_S", 2.0)
        made = extension()
        assert made is not None
        scheduler, peer = made.Scheduler(made.Policy()), _Echo()

        def direction() -> PreemptiveGroup:
            link = dist.new_group()
            link._group = peer
            return PreemptiveGroup(link, scheduler, (made.Waiter(), made.Waiter()), 1 << 20)

        back, forth = direction(), direction()
        received, sent, went_on = torch.zeros(64), torch.ones(64), threading.Event()

        def compute() -> None:
            peer.receives.wait(HANG_S)
            # With the fault it does, as the receive is over only after this computation.
            went_on.wait(20.0 if mutation else 0.2)
            while went_on.is_set() and not device.compute.queue.host_stands:
                time.sleep(0.001)

        with QueuedOperators(device):
            receive = back.recv([received], 0)
            device.compute.launch(compute)
            send = forth.send([sent], 0)
            receive.wait()
            went_on.set()
            for _ in range(2 * late.launches):
                device.compute.launch(lambda: None)
            send.wait()
        assert (received == 1.0).all()

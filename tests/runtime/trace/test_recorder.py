import time
from contextlib import suppress

import torch
from torch.futures import Future

from megatron.fold3d.observe.trace_files import IterationTrace
from megatron.fold3d.runtime.trace.recorder import Recorder

CPU = torch.device("cpu")


class Launched:
    """A collective that ends when the test says so."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()

    def get_future(self) -> Future[None]:
        return self.future


class Mute:
    """A collective that cannot tell its end, as gloo's reduce-scatter."""

    def get_future(self) -> Future[None]:
        raise RuntimeError("Work::getFuture not implemented.")


def recorder(*wanted: int) -> tuple[Recorder, list[IterationTrace]]:
    delivered: list[IterationTrace] = []
    return Recorder(CPU, wanted.__contains__, delivered.append), delivered


def test_an_iteration_is_delivered_when_a_later_one_begins():
    record, delivered = recorder(2)
    for number in (1, 2):
        with record.iteration(number), record.span("0F0", "compute"):
            time.sleep(0.001)
    assert delivered == []
    before_s = time.time()
    with record.iteration(3), record.span("0F0", "compute"):
        pass
    (row,) = delivered
    assert row.iteration == 2
    assert before_s - 1 < row.start_s < before_s
    ((name, start_s, end_s, kind),) = row.events
    assert (name, kind) == ("0F0", "compute")
    assert 0 <= start_s < start_s + 0.001 <= end_s <= row.end_s
    assert row.gpu_memory_bytes is None
    assert row.host_memory_bytes > 1 << 20


def test_a_collective_ends_in_the_background():
    record, delivered = recorder(1)
    works = [Launched(), Launched()]
    with record.iteration(1):
        record.collective("0ALL_REDUCE", "grad_sync", lambda: works)
    works[0].future.set_result(None)
    record.flush()
    assert delivered == []
    works[1].future.set_result(None)
    record.flush()
    (row,) = delivered
    assert row.events[0].end_s > row.end_s


def test_a_collective_that_cannot_tell_its_end_ends_when_it_was_waited_for():
    record, delivered = recorder(1)
    with record.iteration(1):
        _, end = record.collective("0ALL_REDUCE", "grad_sync", lambda: [Mute()])
        record.collective("2ALL_REDUCE", "grad_sync", list)[1]()  # over when it returned
    record.flush()
    assert delivered == []
    end()
    record.flush()
    assert len(delivered[0].events) == 2


def test_the_end_of_a_run_leaves_out_what_has_not_ended():
    record, delivered = recorder(1)
    with record.iteration(1):
        record.open_span("0RECV_B0", "p2p")
    record.close()
    assert [row.events for row in delivered] == [()]


def test_an_iteration_that_fails_is_not_delivered():
    record, delivered = recorder(1, 2)
    with record.iteration(1):
        pass
    with suppress(RuntimeError), record.iteration(2), record.span("0F0", "compute"):
        raise RuntimeError("connection reset by peer")
    record.close()
    assert [row.iteration for row in delivered] == [1]
    assert not record.is_on


def test_counts_are_of_the_iteration_that_they_happened_in():
    record, delivered = recorder(1, 3)
    for number in (1, 2, 3):
        with record.iteration(number):
            record.count("offloaded_bytes", number)
            record.count("offloaded_bytes", 10)
    record.close()
    assert [row.counts for row in delivered] == [{"offloaded_bytes": 11}, {"offloaded_bytes": 13}]

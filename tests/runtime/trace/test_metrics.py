from dataclasses import replace

import pytest

from megatron.fold3d.observe.trace_files import Event, IterationTrace
from megatron.fold3d.runtime.trace.metrics import Metrics
from tests.end_to_end.test_writers import TensorBoard, Wandb

ROW = IterationTrace(
    iteration=7,
    start_s=1e9,
    end_s=10.0,
    events=(
        Event("1RECV_F0", 0.0, 1.5, "p2p"),
        Event("wait 1RECV_F0", 0.0, 1.5, "wait"),
        Event("1F0", 1.5, 2.5, "compute"),
        Event("1OFFLOAD0", 2.5, 3.0, "offload"),
        Event("1B0", 2.5, 4.5, "compute"),
        Event("1ALL_REDUCE", 4.5, 9.0, "grad_sync"),
        Event("wait 1ALL_REDUCE", 4.5, 9.5, "wait"),
        Event("optimizer", 9.0, 9.5, "optimizer"),
    ),
    gpu_memory_bytes=None,
    host_memory_bytes=1 << 20,
)
SECONDS = {
    "forward_s": 1.0,
    "backward_s": 2.0,
    "optimizer_s": 0.5,
    "exposed_grad_sync_s": 4.5,
    "copies_s": 0.5,
    "bubble_and_exposed_p2p_s": 2.0,
    "total_s": 10.0,
}


def test_an_iteration_goes_to_the_writers_that_there_are():
    tensorboard, wandb = TensorBoard(), Wandb()
    counts = {"offloaded_bytes": 4096.0, "deferred_grad_sync_share": 0.3}
    Metrics(lambda: tensorboard, lambda: wandb).write(replace(ROW, counts=counts))
    expected = {(f"fold3d/{name}", 7): [value] for name, value in (SECONDS | counts).items()}
    assert tensorboard.values == {name: pytest.approx(value) for name, value in expected.items()}
    assert wandb.values == {**tensorboard.values, ("fold3d/iteration", 7): [7.0]}


def test_nothing_is_written_to_a_run_that_is_finished():
    wandb = Wandb()
    wandb.run = None
    metrics = Metrics(lambda: None, lambda: wandb)
    metrics.write(ROW)
    assert not metrics.is_wanted
    assert wandb.values == {}
    assert Metrics(lambda: None, Wandb).is_wanted
    assert not Metrics(lambda: None, lambda: None).is_wanted

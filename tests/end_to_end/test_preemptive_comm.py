"""PP.sync before DP.sync changes when something is sent, not what: bit for bit stock's."""

import shlex
from pathlib import Path

import pytest

from megatron.fold3d.observe.trace_files import read_ranks
from megatron.fold3d.runtime.preemption.communicator import extension
from tests.distributed import run_distributed
from tests.end_to_end.training import TINY, as_known, differences, train

pytestmark = [
    pytest.mark.gloo,
    pytest.mark.skipif(extension() is None, reason="needs the extension: make extension"),
]

MODEL = (
    f"{TINY} --num-layers 8 --train-iters 4 --lr 1e-2 --lr-decay-iters 10 --eval-iters 1 "
    "--eval-interval 3 "
    "--pipeline-model-parallel-size 2 --segments 2 --global-batch-size 8 --overlap-grad-reduce"
)
PREEMPTS = "--preemptive-comm --schedule aiao:slice-bytes=4096"


# Flags of both runs, and those of ours.
ROWS = (
    ("--bf16 --use-distributed-optimizer --overlap-param-gather", PREEMPTS),
    ("--clip-grad 0", f"{PREEMPTS}:step=next:share=0.5"),
    (
        "--use-distributed-optimizer --recompute-granularity selective",
        f"{PREEMPTS} --offload-activations on --lazy-inter-segment",
    ),
)


def traced(ours: str, folder: Path) -> list[str]:
    return shlex.split(f"{ours} --trace {folder} --trace-iterations 3-4")


@pytest.mark.parametrize(("flags", "ours"), ROWS)
def test_losses_and_parameters_are_those_of_stock(flags: str, ours: str, tmp_path: Path) -> None:
    command = shlex.split(f"{MODEL} {flags}")
    record = run_distributed(train, 4, (*command, *traced(ours, tmp_path)))
    stock = run_distributed(train, 4, (*command, "--schedule", "stock"))

    assert differences(record, as_known(record, stock)) == []
    ranks = read_ranks(tmp_path)
    assert len(ranks) == 4
    for rank in ranks:
        assert [row.iteration for row in rank.iterations] == [3, 4]
        for row in rank.iterations:
            assert {event.kind for event in row.events} >= {"compute", "p2p", "wait", "grad_sync"}
            assert all(event.start_s <= event.end_s for event in row.events)
        # Evaluation gathers the parameters of the iteration before it.
        kinds = {event.kind for row in rank.iterations for event in row.events}
        assert ("param_gather" in kinds) == ("--use-distributed-optimizer" in flags)

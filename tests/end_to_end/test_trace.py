"""A trace of a real run names what its plan names, in the plan's order, and changes no result."""

import contextlib
import json
import logging
import os
import re
import shlex
import time
from collections import defaultdict
from pathlib import Path

import pytest

from megatron.fold3d.cli import main
from megatron.fold3d.observe.exposure import exposure
from megatron.fold3d.observe.timeline import LAYER_SYNCS, Lane
from megatron.fold3d.observe.trace_files import RankTrace, read_ranks
from megatron.fold3d.observe.trace_timeline import to_timeline
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.ops import COMPUTE_OPS, RECV_OPS
from tests.distributed import run_distributed
from tests.end_to_end.training import TINY, differences, heard, train, watch

pytestmark = pytest.mark.gloo

_DATA = re.compile(r'<script id="data".*?>(.*?)</script>')

SIZES = (
    f"{TINY} --num-layers 8 --pipeline-model-parallel-size 2 --segments 2 "
    "--lr 1e-2 --eval-iters 1 --eval-interval 4"
)
MODEL = (
    f"{SIZES} --global-batch-size 8 --train-iters 6 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather"
)


def test_both_schedules_are_traced_alike_and_train_alike(tmp_path: Path) -> None:
    stock_dir, ours_dir = tmp_path / "stock", tmp_path / "ours"
    one_group = "--microbatch-group-size-per-virtual-pipeline-stage 4"
    stock, ours = (
        run_distributed(train, 4, shlex.split(f"{MODEL} {schedule} --trace {folder}"))
        for schedule, folder in (
            (f"--schedule stock {one_group}", stock_dir),
            ("--schedule aiao --trace-iterations 2-5", ours_dir),
        )
    )
    assert differences(ours, stock) == []
    for folder, iterations in ((stock_dir, [4, 5]), (ours_dir, [2, 3, 4, 5])):
        ranks = read_ranks(folder)
        places = [(r.rank, r.pp_rank, r.dp_rank) for r in ranks]
        assert places == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
        assert ranks[0].microbatch_flops > 0
        for rank in ranks:
            assert [row.iteration for row in rank.iterations] == iterations
            # Evaluation has gathered the parameters of the iteration behind it.
            assert {event.kind for row in rank.iterations for event in row.events} >= {
                *("compute", "wait", "grad_sync", "param_gather", "optimizer")
            }
        assert main(["trace", str(folder)]) == 0
        views = json.loads(_DATA.search((folder / "timeline.html").read_text())[1])["views"]
        assert [view["name"] for view in views] == ["measured", "simulated"]
    plan = Plan.from_text(read_ranks(ours_dir)[0].plan)
    assert read_ranks(stock_dir)[0].plan == ""
    for folder in (ours_dir, stock_dir):  # one group of all micro-batches: the same order
        _check_order(read_ranks(folder), plan)


SHARED_LAYERS = "--tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 2"
SHARED_EXPERTS = (
    "--expert-model-parallel-size 2 --num-experts 2 --moe-router-topk 1 --moe-router-pre-softmax "
    "--moe-token-dispatcher-type alltoall --disable-bias-linear --global-batch-size 4"
)


@pytest.mark.parametrize(
    ("shared", "lane", "in_forward"),
    [
        (SHARED_LAYERS, Lane.TP_SYNC, 4),  # two all-gathers and two reduce-scatters
        (SHARED_EXPERTS, Lane.EP_SYNC, 3),  # tokens, their probabilities, and the results
    ],
)
def test_collectives_of_layers_have_a_lane_with_and_without_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shared: str, lane: Lane, in_forward: int
) -> None:
    sizes = f"{SIZES} --num-layers 4 --pipeline-model-parallel-size 1 --segments 1 {shared}"
    runs = []
    for schedule in ("stock", "afab:pairs=on"):
        folder = tmp_path / schedule.split()[0]
        flags = f"--train-iters 4 --schedule {schedule}"
        argv = shlex.split(f"{sizes} {flags} --trace {folder} --trace-iterations 2-3")
        runs.append(run_distributed(train, 2, argv))
        (rank, _) = read_ranks(folder)
        timeline = to_timeline([rank])
        collectives, computed = timeline.lane(0, lane), timeline.lane(0, Lane.COMPUTE)
        # As many or more in a backward; of two micro-batches in two iterations.
        assert len(collectives) >= 2 * 2 * 4 * 2 * in_forward
        inside = [
            c
            for c in collectives
            if any(f.start_s <= c.start_s and c.end_s <= f.end_s for f in computed)
        ]
        assert len(inside) > len(collectives) / 2
        assert main(["trace", str(folder)]) == 0
        assert f"{LAYER_SYNCS[lane]}      " in capsys.readouterr().out
    assert differences(runs[1], runs[0]) == []


def _check_order(ranks: tuple[RankTrace, ...], plan: Plan) -> None:
    timeline = to_timeline((ranks[0], ranks[2]))
    for number, program in enumerate(plan.programs):
        computed = [action for action in program if action.op in COMPUTE_OPS]
        spans = [s for s in timeline.lane(number, Lane.COMPUTE) if s.iteration == 1]
        assert list(dict.fromkeys(span.action for span in spans)) == computed
        arrived = {span.action for span in timeline.lane(number, Lane.P2P)}
        assert arrived == {action for action in program if action.op in RECV_OPS}
        synced = {str(span.action) for span in timeline.lane(number, Lane.GRAD_SYNC)}
        stages = {action.stage for action in computed}
        ops = {"REDUCE_SCATTER", "ALL_GATHER"}
        assert synced == {f"{stage}{op}" for stage in stages for op in ops}
        waits = {str(span.action) for span in timeline.lane(number, Lane.WAIT) if span.action}
        assert waits <= synced
    first, _ = exposure(timeline)
    *_, before_s, end_s = timeline.iteration_ends_s(0)
    assert first.total_s == pytest.approx(end_s - before_s)
    assert min(first.forward_s, first.backward_s, first.optimizer_s) > 0


def test_a_run_that_dies_after_its_traced_iterations_leaves_a_whole_trace(tmp_path: Path) -> None:
    argv = shlex.split(f"{MODEL} --schedule aiao --trace {tmp_path} --trace-iterations 2")
    with pytest.raises(Exception, match="the network is gone"):
        run_distributed(_train_until_the_fourth_iteration, 4, argv)
    texts = [path.read_text() for path in sorted(tmp_path.iterdir())]
    assert [json.loads(text)["iterations"][0]["iteration"] for text in texts] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("schedule", "fault", "reason"),
    [
        ("stock", "a full disk", "No space left on device"),
        ("aiao", "a file where the folder was", "File exists"),
    ],
)
def test_a_trace_that_cannot_be_written_costs_a_warning_and_not_the_run(
    schedule: str, fault: str, reason: str, tmp_path: Path
) -> None:
    folder = tmp_path / "trace"
    flags = f"--global-batch-size 2 --train-iters 4 --schedule {schedule} --trace {folder}"
    argv = shlex.split(f"{SIZES} {flags} --trace-iterations 2")
    for rank, said in enumerate(run_distributed(_train_with_full_disk, 2, argv, folder, fault)):
        (warning,) = said
        assert f"{folder}/rank-{rank:05}.json cannot be written ({reason})" in warning


def _train_with_full_disk(argv: list[str], folder: Path, fault: str) -> list[str]:
    """Train with a folder in which nothing can be written; returns what the tracer says."""
    if fault == "a full disk":
        folder.mkdir(exist_ok=True)
        for rank in range(2):
            with contextlib.suppress(FileExistsError):
                (folder / f"rank-{rank:05}.part").symlink_to("/dev/full")
    said = heard("megatron.fold3d.runtime.trace.tracer", logging.WARNING)

    from megatron.training import training

    if fault != "a full disk":
        watch(training, "train_step", lambda *_, **__: folder.touch())
    assert len(train(argv).iterations) == 4
    return said


def test_weights_and_biases_is_told_of_every_iteration_that_ends_before_it(tmp_path: Path) -> None:
    """Without TensorBoard Megatron says nothing to it, and its step stands still."""
    flags = (
        "--global-batch-size 4 --train-iters 4 --schedule aiao:step=next:share=0.5 "
        "--overlap-grad-reduce --clip-grad 0 --untie-embeddings-and-output-weights "
        f"--offload-activations on --trace {tmp_path} --trace-iterations 2 "
        f"--wandb-project fold3d --wandb-exp-name run --wandb-save-dir {tmp_path}"
    )
    run_distributed(_train_offline, 2, shlex.split(f"{SIZES} {flags}"))
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    for _ in range(100):  # its own process may write it behind the run
        found = _logged(log.read_bytes())
        if "3" in found["iteration"]:
            break
        time.sleep(0.2)
    assert found["iteration"] == {"1", "2", "3"}
    assert found["deferred_grad_sync_share"] == {"0.5"}
    (row,) = read_ranks(tmp_path)[1].iterations
    # No flag says what a forward without recomputation saves: the first iteration keeps it.
    assert found["offloaded_bytes"] == {"0", str(row.counts["offloaded_bytes"])}
    assert row.counts["offloaded_bytes"] > 0
    names = {event.name for event in row.events}
    assert names >= {"3ALL_REDUCE:500", "3ALL_REDUCE", "wait 3ALL_REDUCE", "3STEP"}


def _train_offline(argv: list[str]) -> None:
    os.environ["WANDB_MODE"] = "offline"
    train(argv)


def _logged(log: bytes) -> dict[str, set[str]]:
    """Return our keys in a log of W&B's with their values, each a string behind its length."""
    values: defaultdict[str, set[str]] = defaultdict(set)
    for match in re.finditer(rb"fold3d/(\w+)\x82\x01(.)", log, re.DOTALL):
        text = log[match.end() : match.end() + match[2][0]]
        values[match[1].decode()].add(text.decode())
    return values


def _train_until_the_fourth_iteration(argv: list[str]) -> None:
    from megatron.training import get_args

    from megatron.fold3d.runtime.executor import Executor

    def fail(*_: object, **__: object) -> None:
        if get_args().curr_iteration == 3:
            raise RuntimeError("the network is gone")

    watch(Executor, "__call__", fail)
    train(argv)

import json
import os
import sys
from pathlib import Path

import pytest

from megatron.fold3d.plan.schedules import ONE_SEGMENT_SCHEDULES, SCHEDULES

AIAO = "plan --schedule aiao --pp 2 --segments 2 --microbatches 3"


@pytest.mark.parametrize("form", ["", "--format csv", "--json"])
@pytest.mark.parametrize("compute_only", ["", "--compute-only"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_verify_accepts_what_plan_writes(fold3d, tmp_path, schedule, compute_only, form):
    path = tmp_path / "plan"
    segments = 1 if schedule in ONE_SEGMENT_SCHEDULES else 2
    line = f"plan --schedule {schedule} --pp 3 --segments {segments} --microbatches 4"
    path.write_text(fold3d.out(f"{line} {compute_only} {form}"))
    out = fold3d.out(f"verify --plan-file {path}")
    counted = f"{segments} segment{'s' * (segments > 1)}"
    assert out.startswith(f"cannot deadlock: 3 ranks, {counted}, 4 micro-batches, ")


def test_verify_sums_a_plan_up_in_one_line(fold3d, tmp_path: Path):
    path = tmp_path / "plan.txt"
    path.write_text(fold3d.out(AIAO))
    assert fold3d.out(f"verify --plan-file {path}") == (
        "cannot deadlock: 2 ranks, 2 segments, 3 micro-batches, 68 actions, "
        "peak activations per rank: 6 4\n"
    )
    assert fold3d.json(f"verify --plan-file {path}") == {
        "ok": True,
        "ranks": 2,
        "segments": 2,
        "microbatches": 3,
        "actions": 68,
        "peak_activations": [6, 4],
    }
    path.write_text("0F0 0B0")
    out = fold3d.out(f"verify --plan-file {path}")
    assert out.startswith("cannot deadlock: 1 rank, 1 segment, 1 micro-batch, 2 actions, ")


def test_verify_shows_the_grid_with_the_wrong_cell_marked(fold3d, tmp_path: Path):
    path = tmp_path / "plan.txt"
    path.write_text("0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0\n")
    message = """\
0RECV_B0 has no 1SEND_B0 to go with it
  rank  0 | 0F0          0SEND_F0    >0RECV_B0<    0B0
  rank  1 | 1RECV_F0     1F0          1B0
"""
    assert fold3d(f"verify --plan-file {path}") == (1, "", message)
    code, out, err = fold3d(f"verify --plan-file {path} --json")
    assert (code, err) == (1, message)
    assert json.loads(out) == {"ok": False, "error": message.rstrip()}


@pytest.mark.parametrize("path", [os.devnull, sys.executable])
def test_a_file_that_holds_no_plan_is_one_that_cannot_be_read(fold3d, path: str):
    err = fold3d.refusal(f"verify --plan-file {path}")
    assert err.startswith(f"fold3d verify: {path}: ")


def test_verify_plays_a_plan_on_gpus_with_few_queues(fold3d, tmp_path: Path):
    path = tmp_path / "plan.txt"
    path.write_text(
        "0F0 0SEND_F0 0RECV_B0 0RECV_B1 0RECV_B2 0F1 0SEND_F1 0F2 0SEND_F2 0B0 0B1 0B2\n"
        "1RECV_F0 1RECV_F1 1F0 1F1 1RECV_F2 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2\n"
    )
    for more in ("", "--cuda-connections 8", "--cuda-connections 32 --tensor-parallel"):
        fold3d.out(f"verify --plan-file {path} {more}")
    code, out, err = fold3d(f"verify --plan-file {path} --cuda-connections 1")
    assert (code, out) == (1, "")
    assert err.startswith("deadlock with one hardware queue: rank 0 is held up at 0RECV_B2 until ")
    assert ">0RECV_B2<" in err
    said = fold3d.refusal(f"verify --plan-file {path} --tensor-parallel")
    assert "give --cuda-connections 1" in said

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.fold3d.cli import main
from megatron.fold3d.plan.schedules import ONE_SEGMENT_SCHEDULES, SCHEDULES

AIAO = "plan --schedule aiao --pp 2 --segments 2 --microbatches 3"


@pytest.fixture
def fold3d(capsys: pytest.CaptureFixture[str]):
    """Run one command line; returns its exit code, stdout and stderr."""

    def run(line: str) -> tuple[int, str, str]:
        try:
            code = main(shlex.split(line))
        except SystemExit as exit_:  # argparse
            code = int(exit_.code or 0)
        return code, *capsys.readouterr()

    return run


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a shell line in which ``fold3d`` is the command."""
    script = "import sys; from megatron.fold3d.cli import main; sys.exit(main())"
    function = f'fold3d() {{ {shlex.quote(sys.executable)} -c {shlex.quote(script)} "$@"; }}'
    return subprocess.run(
        ["bash", "-c", f"{function}; {line}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_plan_prints_one_line_per_rank(fold3d):
    code, out, err = fold3d(f"{AIAO} --compute-only")
    assert (code, err) == (0, "")
    assert (
        out
        == """\
0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2
"""
    )


def test_plan_prints_the_last_segment_as_the_paper_has_it(fold3d):
    _, out, _ = fold3d(f"{AIAO} --compute-only --aiao-last-segment afab")
    assert out.splitlines() == [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
        "1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2",
    ]


def test_plan_prints_transfers_and_gradient_sync_by_default(fold3d):
    code, out, err = fold3d("plan --schedule 1f1b --pp 2 --microbatches 2")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0REDUCE_GRAD 0WAIT_GRAD",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1REDUCE_GRAD 1WAIT_GRAD",
    ]


def test_the_group_size_reaches_the_schedule(fold3d):
    line = "plan --schedule interleaved --pp 2 --segments 2 --microbatches 4 --compute-only"
    _, depth_first, _ = fold3d(line)
    _, one_group, _ = fold3d(f"{line} --group-size 4")
    assert depth_first.startswith("0F0 0F1 2F0 2F1 0F2")
    assert one_group.startswith("0F0 0F1 0F2 0F3 2F0")


@pytest.mark.parametrize("form", ["", "--format csv", "--json"])
@pytest.mark.parametrize("compute_only", ["", "--compute-only"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_verify_accepts_what_plan_writes(
    fold3d, tmp_path: Path, schedule: str, compute_only: str, form: str
):
    path = tmp_path / "plan"
    segments = 1 if schedule in ONE_SEGMENT_SCHEDULES else 2
    line = f"plan --schedule {schedule} --pp 3 --segments {segments} --microbatches 4"
    assert fold3d(f"{line} {compute_only} {form} --output {path}") == (0, "", "")
    code, out, err = fold3d(f"verify --plan-file {path}")
    assert (code, err) == (0, "")
    assert out.startswith(f"3 ranks, {segments} segments, 4 micro-batches, ")


def test_verify_sums_a_plan_up_in_one_line(fold3d, tmp_path: Path):
    path = tmp_path / "plan.txt"
    fold3d(f"{AIAO} --output {path}")
    _, out, _ = fold3d(f"verify --plan-file {path}")
    assert out == (
        "2 ranks, 2 segments, 3 micro-batches, 68 actions, peak activations per rank: 6 4\n"
    )
    _, out, _ = fold3d(f"verify --plan-file {path} --json")
    assert json.loads(out) == {
        "ok": True,
        "ranks": 2,
        "segments": 2,
        "microbatches": 3,
        "actions": 68,
        "peak_activations": [6, 4],
    }


def test_verify_rejects_a_plan_without_any_one_of_its_actions(fold3d, tmp_path: Path):
    _, text, _ = fold3d(AIAO)
    path = tmp_path / "plan.txt"
    for word in text.split():  # no action appears twice
        rows = [[w for w in line.split() if w != word] for line in text.splitlines()]
        path.write_text("\n".join(map(" ".join, rows)))
        code, out, err = fold3d(f"verify --plan-file {path}")
        assert (code, out) == (1, "")
        assert word in err


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


def test_plan_as_json_holds_sizes_and_programs(fold3d):
    _, out, _ = fold3d("plan --schedule 1f1b --pp 2 --microbatches 1 --compute-only --json")
    assert json.loads(out) == {
        "schedule": "1f1b",
        "ranks": 2,
        "segments": 1,
        "microbatches": 1,
        "actions": 4,
        "peak_activations": [1, 1],
        "programs": [["0F0", "0B0"], ["1F0", "1B0"]],
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("plan", "the following arguments are required: --schedule, --pp, --microbatches"),
        ("plan --schedule gpipe --pp 2 --microbatches 2", "invalid choice: 'gpipe'"),
        ("plan --schedule aiao --pp two --microbatches 2", "invalid int value: 'two'"),
        (f"{AIAO} --json --format csv", "not allowed with argument"),
        ("plan --schedule aiao --pp 2 --microbatches 0", "found 0 micro-batches"),
        ("plan --schedule aiao --pp -2 --microbatches 2", "found -2 ranks"),
        ("plan --schedule 1f1b --pp 2 --segments 2 --microbatches 2", "try --segments 1"),
        (f"{AIAO} --group-size 2", "--group-size 2 with --schedule aiao: only interleaved reads"),
        ("plan --schedule interleaved --pp 4 --microbatches 4 --group-size 0", "at least 4"),
        (
            "plan --schedule afab --pp 2 --microbatches 2 --aiao-last-segment afab",
            "--aiao-last-segment afab with --schedule afab: only aiao reads it",
        ),
        (f"{AIAO} --output /nowhere/plan.txt", "/nowhere/plan.txt: No such file or directory"),
        ("verify", "the following arguments are required: --plan-file"),
        ("verify --plan-file /nowhere/plan.txt", "/nowhere/plan.txt: No such file or directory"),
        ("verify --plan-file /", "/: Is a directory"),
    ],
)
def test_a_mistake_in_the_command_line_exits_with_2(fold3d, line: str, message: str):
    code, out, err = fold3d(line)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]


@pytest.mark.parametrize("path", [os.devnull, sys.executable])
def test_a_file_that_holds_no_plan_is_rejected(fold3d, path: str):
    code, out, err = fold3d(f"verify --plan-file {path}")
    assert (code, out) == (1, "")
    assert err.startswith(f"{path}: ")
    assert err.count("\n") == 1


def test_every_command_explains_itself_with_examples(fold3d):
    for command in ("plan", "verify"):
        code, out, _ = fold3d(f"{command} --help")
        assert code == 0
        assert "examples:\n  fold3d " in out
        assert command in fold3d("--help")[1]


def test_a_plan_passes_through_a_pipe():
    result = shell(f"fold3d {AIAO} --format csv | fold3d verify --plan-file -")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("2 ranks, 2 segments, 3 micro-batches")


def test_a_reader_that_has_seen_enough_is_no_error():
    plan = "fold3d plan --schedule aiao --pp 8 --segments 4 --microbatches 500"
    result = shell(f"set -o pipefail; {plan} | head -c 3")
    assert (result.returncode, result.stdout, result.stderr) == (0, "0F0", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported():
    result = shell(f"fold3d {AIAO} > /dev/full")
    assert (result.returncode, result.stderr) == (2, "fold3d plan: No space left on device\n")


def test_closed_streams_cause_no_traceback():
    assert shell(f"fold3d {AIAO} >&-").stderr == ""
    result = shell("fold3d verify --plan-file - <&-")
    assert (result.returncode, result.stderr) == (2, "fold3d verify: Bad file descriptor\n")

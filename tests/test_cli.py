import json
import os
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest

from megatron.fold3d.analysis.candidates import Candidate
from megatron.fold3d.analysis.cluster import cluster
from megatron.fold3d.analysis.model import model_shape
from megatron.fold3d.analysis.sizes import Setup
from megatron.fold3d.commands.training_flags import _layout, training_flags
from megatron.fold3d.config import Fold3DConfig, add_arguments
from megatron.fold3d.plan.schedules import ONE_SEGMENT_SCHEDULES, SCHEDULES

AIAO = "plan --schedule aiao --pp 2 --segments 2 --microbatches 3"
SIMULATE = "simulate --schedule aiao --pp 2 --segments 2 --microbatches 4"
SEARCH = "search --global-batch-size 64"
SHAPE = model_shape("gpt3-18b")
ON_A100 = "--model 24-2048-16 --cluster a100x8"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """Run a shell line in which ``fold3d`` is the command."""
    script = "import sys; from megatron.fold3d.cli import main; sys.exit(main())"
    function = f'fold3d() {{ {shlex.quote(sys.executable)} -c {shlex.quote(script)} "$@"; }}'
    return subprocess.run(
        ["bash", "-c", f"{function}; {line}"],
        capture_output=True,
        text=True,
        timeout=200,
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


def test_the_weight_gradients_of_a_segment_can_be_delayed(fold3d):
    line = "--schedule aiao --pp 1 --segments 2 --microbatches 2 --delay-weight-grads 1"
    code, out, _ = fold3d(f"plan {line} --compute-only")
    assert code == 0
    assert out == "0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1 1W0 1W1\n"
    # F 4, B of both segments 4 + 2, W 2 beside segment 0's DP.sync of 2; segment 1's follows.
    _, out, _ = fold3d(f"simulate {line} --grad-sync-s 2 --json")
    assert json.loads(out)["period_s"] == 4 + 4 + 2 + 2 + 2


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
    counted = f"{segments} segment{'s' * (segments > 1)}"
    assert out.startswith(f"3 ranks, {counted}, 4 micro-batches, ")


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


def test_verify_counts_one_as_one(fold3d, tmp_path: Path):
    path = tmp_path / "plan.txt"
    path.write_text("0F0 0B0")
    _, out, _ = fold3d(f"verify --plan-file {path}")
    assert out.startswith("1 rank, 1 segment, 1 micro-batch, 2 actions, ")


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
        ("plan --schedule aiao --pp 99999999 --microbatches 2", "no memory holds a plan of over"),
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
        ("simulate", "one of the arguments --schedule --plan-file is required"),
        ("simulate --schedule aiao --pp 2", "--schedule aiao without --microbatches"),
        (f"{SIMULATE} --plan-file x", "not allowed with argument --schedule"),
        ("simulate --plan-file x --pp 2", "--pp 2 with --plan-file: a plan has its sizes"),
        ("simulate --plan-file x --delay-weight-grads 1,2", "--delay-weight-grads 1,2 with --plan"),
        (f"{SIMULATE} --delay-weight-grads 0,2", "no segment 2 whose weight gradients could be"),
        (f"{SIMULATE} --delay-weight-grads all", "'all' is not a list of segments such as 3,4"),
        (f"{SIMULATE} --iterations 0", "--iterations 0: a run has at least one"),
        (f"{SIMULATE} --iterations 1001", "all are alike long before 1000"),
        (f"{SIMULATE} --forward-s -1", "--forward-s -1.0: seconds are zero or more"),
        (f"{SIMULATE} --p2p-s nan", "--p2p-s nan: seconds are zero or more"),
        (f"{SIMULATE} --forward-s 1 --costs x", "--forward-s with --costs: costs have one source"),
        (f"{SIMULATE} --model 24-2048-16", "--model without --cluster: it is for the costs of"),
        (f"{SIMULATE} --tp 2", "--tp without --model and --cluster"),
        (
            f"{SIMULATE} --segments 2 --pp 1 --bogus",
            "simulate: error: unrecognized arguments: --bo",
        ),
        (f"{SIMULATE} {ON_A100} --tp 3", "does not use the 8 GPUs of a100x8; try --tp 2"),
        (f"{SIMULATE} {ON_A100} --dp 3", "does not use the 8 GPUs of a100x8; try --dp 4"),
        (f"{SIMULATE} {ON_A100} --tp 0", "--tp 0: a size is at least one"),
        (
            f"{SIMULATE} --model 25-2048-16 --cluster a100x8",
            "pp 2 x segments 2; try a --pp that divides 25",
        ),
        (f"{SEARCH} --model gpt9 --cluster a100x8", "unknown model 'gpt9'; choose from"),
        (f"{SEARCH} --model gpt3-18b --cluster a100", "unknown cluster 'a100'; write <node>x"),
        (f"{SEARCH} --model gpt3-18b --cluster a100x9", "do not fill nodes of 8; try 8"),
        (f"{SEARCH} --model gpt3-18b --cluster a100x8000000", "give 1000000 at most"),
        (f"{SEARCH} --model 99999-64-4 --cluster a100x8", "found num_layers=99999; give 10000"),
        (f"{SEARCH} --model gpt-1t --cluster v100x8", "does not fit on v100x8: the smallest"),
        (f"{SEARCH} {ON_A100} --top 0", "--top 0: show at least one"),
        (f"{SEARCH} {ON_A100} --task-overhead-s -1", "found task_overhead_s=-1.0; it is zero or"),
        (
            f"{SEARCH} {ON_A100} --assume luck",
            "found 'luck'; it is one of preemptive-comm, offload, delay-weight-grads",
        ),
        (f"{SEARCH} --model t5 --cluster a100x64 --emit", "t5: Megatron-core runs no encoder"),
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
    for command in ("plan", "verify", "simulate", "search"):
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


def test_simulate_prints_times_exposure_and_the_grid(fold3d, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    code, out, err = fold3d("simulate --schedule 1f1b --pp 2 --microbatches 2 --grad-sync-s 1.5")
    assert (code, err) == (0, "")
    assert (
        out
        == """\
1f1b: 2 ranks, 1 segment, 2 micro-batches
iteration         10.5 s
bubble            50.0% of computation
peak activations  2 1  per rank

            forward  backward    bubble   DP.sync   PP.sync     total
seconds           2         4         3       1.5         0      10.5
share         19.0%     38.1%     28.6%     14.3%      0.0%    100.0%

rank 0 | 0F0 0F1 ·   ·   0B0──── ·   0B1────
rank 1 | ·   1F0 1B0──── 1F1 1B1──── ·   ·
"""
    )


def test_the_grid_is_left_out_where_it_does_not_fit(fold3d, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "24")
    line = "simulate --schedule 1f1b --pp 8"
    assert "rank 7 |" in fold3d(f"{line} --microbatches 1")[1]
    assert "rank 7 |" not in fold3d(f"{line} --microbatches 40")[1]


def test_simulate_as_json_adds_up(fold3d):
    _, out, _ = fold3d(f"{SIMULATE} --p2p-s 0.1 --grad-sync-s 6 --json")
    result = json.loads(out)
    assert (result["name"], result["ranks"], result["segments"]) == ("aiao", 2, 2)
    assert result["period_s"] == result["makespan_s"]
    for row in (result["exposure"], *result["exposure_of_rank"]):
        columns = (seconds for column, seconds in row.items() if column != "total_s")
        assert sum(columns) == pytest.approx(row["total_s"])
        assert row["total_s"] == pytest.approx(result["period_s"])


def test_grad_sync_hides_behind_other_segments_and_the_next_iteration(fold3d):
    periods = {
        choice: json.loads(fold3d(f"{SIMULATE} --grad-sync-s 9 --grad-sync {choice} --json")[1])[
            "period_s"
        ]
        for choice in ("serial", "overlap", "deferred")
    }
    assert periods["serial"] > periods["overlap"] > periods["deferred"]


def test_a_plan_file_is_simulated_like_its_schedule(fold3d, tmp_path: Path):
    path = tmp_path / "plan.txt"
    fold3d(f"plan --schedule aiao --pp 2 --segments 2 --microbatches 4 --output {path}")
    by_name, by_file = (
        json.loads(fold3d(f"{line} --p2p-s 0.2 --grad-sync-s 3 --json")[1])
        for line in (SIMULATE, f"simulate --plan-file {path}")
    )
    assert by_file["period_s"] == by_name["period_s"]
    assert by_file["exposure"] == by_name["exposure"]


def test_a_plan_that_cannot_run_is_not_simulated(fold3d, tmp_path: Path):
    path = tmp_path / "plan.txt"
    path.write_text("0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0\n")
    code, out, err = fold3d(f"simulate --plan-file {path}")
    assert (code, out) == (1, "")
    assert err.startswith(f"{path}: 0RECV_B0 has no 1SEND_B0 to go with it\n")


def test_simulate_reads_costs_and_draws(fold3d, tmp_path: Path):
    costs, svg = tmp_path / "costs.json", tmp_path / "aiao.svg"
    costs.write_text(json.dumps({"forward_s": [1, 1, 1, 1], "backward_s": [2, 2, 2, 2]}))
    code, out, err = fold3d(f"{SIMULATE} --costs {costs} --svg {svg}")
    assert (code, err) == (0, "")
    assert out == fold3d(SIMULATE)[1]
    assert svg.read_text().startswith("<svg ")


NESTED = '{"forward_s":' * 50_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not costs: Expecting value"),
        (b"\xff\xfe", "not text in UTF-8"),
        pytest.param(NESTED.encode(), "not costs: nested too deeply", id="nested"),
        (b"[1, 2]", "not costs: found a list; give one JSON object"),
        (b'{"forward_s": [1]}', "lacks backward_s; needed are forward_s, backward_s"),
        (b'{"forward_s": [1], "backward_s": [2], "f": 1}', "has unknown f; needed are"),
        (b'{"forward_s": 1, "backward_s": 2}', "found forward_s=1; it is a list of finite"),
        (b'{"forward_s": [1], "backward_s": [2], "p2p_s": [1]}', "p2p_s=(1,); it is one number"),
        (b'{"forward_s": [1], "backward_s": [2]}', "found 1 numbers in forward_s"),
        (b'{"forward_s": [1,1,1,NaN], "backward_s": [2,2,2,2]}', "seconds are zero or more"),
    ],
)
def test_a_file_that_holds_no_costs_is_refused(
    fold3d, tmp_path: Path, content: bytes, message: str
):
    costs = tmp_path / "costs.json"
    costs.write_bytes(content)
    code, out, err = fold3d(f"{SIMULATE} --costs {costs}")
    assert (code, out) == (2, "")
    assert err.startswith(f"fold3d simulate: {costs}: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["deep.json", "binary.toml", "nowhere.json"])
def test_a_model_file_that_cannot_be_read_is_named(fold3d, tmp_path: Path, name: str):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "binary.toml").write_bytes(b"\xff")
    code, out, err = fold3d(f"{SEARCH} --cluster a100x8 --model {tmp_path / name}")
    assert (code, out) == (2, "")
    assert err.startswith(f"fold3d search: cannot read a model from {tmp_path / name}: ")
    assert err.count("\n") == 1


def test_ctrl_c_while_a_command_is_loaded_causes_no_traceback(fold3d, monkeypatch):
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatron.fold3d.cli.import_module", interrupted)
    assert fold3d(AIAO) == (130, "", "")


def test_a_model_that_does_not_fit_is_answered_with_no(fold3d):
    line = "simulate --schedule 1f1b --pp 4 --microbatches 8 --model gpt3-14b --cluster a100x32"
    code, out, err = fold3d(f"{line} --tp 8 --micro-batch-size 16")
    assert code == 1
    assert "peak memory" in out
    assert "rank 0 needs" in err
    fix = "--recompute selective"
    assert err.endswith(f"; {fix} fits\n")
    assert fold3d(f"{line} --tp 8 --micro-batch-size 16 {fix}")[0] == 0
    assert "no --recompute makes it fit" in fold3d(f"{line} --tp 1")[2]


def test_search_says_what_is_best_and_how_to_run_it(fold3d):
    line = "search --model 12-1024-16-512 --cluster a100x8 --global-batch-size 16"
    code, out, _ = fold3d(f"{line} --top 3")
    assert code == 0
    assert len(out.splitlines()) >= 7  # a head, three rows, what was considered, verdict, flags
    _, emitted, _ = fold3d(f"{line} --emit")
    assert emitted in out
    _, as_json, _ = fold3d(f"{line} --top 3 --json")
    result = json.loads(as_json)
    assert len(result["rows"]) == 3
    assert result["flags"] == emitted.rstrip()
    seconds = [row["iteration_s"] for row in result["rows"]]
    assert seconds == sorted(seconds)
    assert result["best_stock"]["stock"]


def test_search_says_that_aiao_gains_nothing_where_it_does_not(fold3d):
    _, out, _ = fold3d("search --model 24-2048-16 --cluster h100x8 --global-batch-size 64 --top 2")
    *_, verdict, flags = out.splitlines()
    assert verdict == "AIAO gains nothing here, use these stock flags:"
    assert "--schedule" not in flags


def test_what_no_gpu_has_timed_is_tried_on_request(fold3d):
    line = "search --model testbed --cluster testbedx4 --global-batch-size 16 --pp 2 --fp32"
    assumed = "preemptive-comm,offload,delay-weight-grads"
    tried = json.loads(fold3d(f"{line} --assume {assumed} --json")[1])
    usual = json.loads(fold3d(f"{line} --json")[1])
    assert tried["considered"] > usual["considered"]
    assert any(row["preemptive_comm"] for row in tried["rows"])
    assert not any(row["preemptive_comm"] or row["offload"] for row in usual["rows"])


@pytest.fixture(scope="module")
def megatrons_parser():
    from megatron.training.arguments import add_megatron_arguments

    parser = ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return add_arguments(parser)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("layers", [(), (6, *(5,) * 6, 4)])
@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {}),
        ("interleaved", {"group_size": 4}),
        ("interleaved", {"group_size": 8}),
        ("interleaved", {"group_size": 8, "is_stock": False}),
        ("aiao", {}),
        ("aiao", {"distributed_optimizer": True}),
        ("aiao", {"backward_share": 0.7}),
        ("aiao", {"offload": True, "preemptive": True}),
        ("aiao", {"backward_share": 0.7, "delayed_weight_grads": (1,)}),
    ],
)
def test_pretrain_gpt_accepts_every_flag_that_is_emitted(
    megatrons_parser, schedule, options, layers, recompute
):
    segments = 1 if schedule == "1f1b" else 2
    options = {"is_stock": schedule != "aiao", **options}
    sharded = options.pop("distributed_optimizer", False)
    setup = Setup(
        tensor_parallel=8,
        data_parallel=2,
        microbatch_size=4,
        sequence_parallel=True,
        distributed_optimizer=sharded,
        recompute=recompute,
    )
    candidate = Candidate(
        schedule=schedule,
        setup=setup,
        num_ranks=4,
        num_segments=segments,
        num_microbatches=8,
        layers=layers if segments == 2 else (),
        **options,
    )
    flags = training_flags(SHAPE, cluster("a100x64"), candidate)
    args = megatrons_parser.parse_args(shlex.split(flags))
    config = Fold3DConfig.from_args(args)
    assert config.schedule == ("stock" if candidate.is_stock else schedule)
    assert (config.num_ranks, config.num_segments) == (4, segments)
    assert args.global_batch_size == 2 * 4 * 8
    assert args.overlap_grad_reduce
    assert args.use_distributed_optimizer == sharded
    assert config.backward_share == options.get("backward_share")
    assert config.delay_weight_grads == candidate.delayed_weight_grads
    assert config.preemptive_comm == candidate.preemptive
    assert config.offload_activations == ("on" if candidate.offload else "off")
    assert args.microbatch_group_size_per_vp_stage == (
        8 if options.get("group_size") == 8 else None
    )


def test_gpus_without_bf16_are_told_to_train_in_fp16(fold3d):
    line = "search --model 12-1024-16-512 --global-batch-size 16 --emit --cluster"
    assert "--bf16" in fold3d(f"{line} a100x8")[1]
    fp16 = fold3d(f"{line} v100x8")[1]
    assert "--fp16 --accumulate-allreduce-grads-in-fp32" in fp16
    assert "--bf16" not in fp16


def test_layers_are_spelled_as_megatron_reads_them():
    from megatron.core.transformer.pipeline_parallel_layer_layout import (
        PipelineParallelLayerLayout,
    )

    (spelled,) = shlex.split(_layout((6, 5, 5, 4)))
    found = PipelineParallelLayerLayout.from_str(spelled, pipeline_model_parallel_size=2)
    assert [[len(s) for s in rank] for rank in found.layout] == [[7, 5], [5, 5]]


CLUSTER_FILE = """\
num_nodes = 1
gpus_per_node = 8
gpu_flops_per_s = 312e12
gpu_memory_bytes = 42e9
nic_bytes_per_s = 25e9
intra_bytes_per_s = 3e11
host_copy_bytes_per_s = 29e9
host_memory_bytes = 1e12
"""


@pytest.mark.parametrize(
    ("line", "becomes", "message"),
    [
        ("num_nodes = 1", "", "lacks num_nodes; a cluster needs"),
        ("num_nodes = 1", "num_nodes = 1.5", "found num_nodes=1.5; it is a whole number"),
        ("num_nodes = 1", "num_nodes = 'one'", "found num_nodes='one'; it is a number"),
        ("intra_bytes_per_s = 3e11", "intra_bytes_per_s = 0", "_per_s=0; it is above zero"),
        ("num_nodes = 1", "num_nodes = 1\nspeed = 3", "unknown fields speed"),
        ("num_nodes = 1", "num_nodes =", "cannot read a cluster from"),
    ],
)
def test_a_cluster_file_is_read_with_care(fold3d, tmp_path: Path, line, becomes, message):
    path = tmp_path / "cluster.toml"
    command = (
        "simulate --schedule 1f1b --pp 2 --microbatches 2 --model 12-1024-16-512 --tp 2 --dp 2 "
        f"--cluster {path}"
    )
    path.write_text(CLUSTER_FILE)
    assert fold3d(command)[0] == 0
    path.write_text(CLUSTER_FILE.replace(line, becomes))
    code, out, err = fold3d(command)
    assert (code, out) == (2, "")
    assert message in err


def test_a_measured_layer_replaces_the_rate_of_the_gpus(fold3d):
    line = (
        "simulate --schedule 1f1b --pp 2 --microbatches 2 --model testbed --cluster testbedx4 "
        "--fp32 --json"
    )

    def forward_s(flags: str) -> float:
        return json.loads(fold3d(f"{line} {flags}")[1])["exposure"]["forward_s"]

    assert forward_s("--layer-forward-s 0.006") == pytest.approx(forward_s(""))
    assert forward_s("--layer-forward-s 0.012") == pytest.approx(2 * forward_s(""))
    assert (
        "--layer-forward-s 0.0: give seconds above zero" in fold3d(f"{line} --layer-forward-s 0")[2]
    )


def test_layers_that_do_not_divide_are_refused_with_segments_that_do(fold3d):
    line = "simulate --schedule aiao --pp 4 --microbatches 8 --model gpt3-18b --cluster a100x32"
    assert "pp 4 x segments 3; try --segments 2" in fold3d(f"{line} --tp 8 --segments 3")[2]


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ("[1]", "not costs"),
        ('{"forward_s": [1, 1]}', "backward_s"),
        ('{"forward_s": 1, "backward_s": [2, 2]}', "a list of finite numbers, one per stage"),
        ('{"forward_s": ["a", 1], "backward_s": [2, 2]}', "seconds are zero or more"),
        ('{"forward_s": [1], "backward_s": [2, 2]}', "1 numbers in forward_s"),
        ('{"forward_s": [1, 1], "backward_s": [2, 2], "p2p_s": NaN}', "found p2p_s=nan"),
        ('{"forward_s": [1, -1], "backward_s": [2, 2]}', "found forward_s=(1, -1)"),
    ],
)
def test_costs_are_read_with_care(fold3d, tmp_path: Path, costs, message):
    path = tmp_path / "costs.json"
    path.write_text(costs)
    code, out, err = fold3d(f"simulate --schedule 1f1b --pp 2 --microbatches 2 --costs {path}")
    assert (code, out) == (2, "")
    assert str(path) in err
    assert message in err


@pytest.mark.parametrize("line", [AIAO, "verify --plan-file /nowhere", "--help"])
def test_plans_are_made_without_loading_the_simulator(line: str):
    heavy = "{'numpy', 'torch', 'megatron.fold3d.analysis'} & set(sys.modules)"
    code = (
        "import sys\nfrom megatron.fold3d.cli import main\n"
        f"try: main({shlex.split(line)})\nexcept SystemExit: pass\nprint({heavy})"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200
    )
    assert result.stdout.endswith("set()\n")

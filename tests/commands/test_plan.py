import json

from tests.plans import ZB_H1

AIAO = "plan --schedule aiao --pp 2 --segments 2 --microbatches 3"


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
    _, out, _ = fold3d(f"{AIAO} --compute-only --schedule afab")
    assert out.splitlines() == [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
        "1F0 1F1 1F2 3F0 3F1 3F2 3B0 3B1 3B2 1B0 1B1 1B2",
    ]


def test_plan_prints_transfers_and_gradient_sync_by_default(fold3d):
    code, out, err = fold3d("plan --schedule 1f1b --pp 2 --microbatches 2")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0ALL_REDUCE 0STEP",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1ALL_REDUCE 1STEP",
    ]


def test_the_weight_gradients_of_a_segment_can_be_delayed(fold3d):
    line = "--schedule aiao:step=next:wgrad=last@1 --pp 1 --segments 2 --microbatches 2"
    code, out, _ = fold3d(f"plan {line} --compute-only")
    assert code == 0
    assert out == "0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1 1W0 1W1\n"
    # DP.sync starts between the weight gradients of a segment, and is no longer than they are.
    line = line.replace("step=next:wgrad=last", "wgrad=behind")
    _, out, _ = fold3d(f"simulate {line} --seconds sum=2 --json")
    assert json.loads(out)["period_s"] == 4 + 4 + 2 + 2 + 2


def test_the_group_size_reaches_the_schedule(fold3d):
    line = "plan --schedule interleaved --pp 2 --segments 2 --microbatches 4 --compute-only"
    _, depth_first, _ = fold3d(line)
    _, one_group, _ = fold3d(f"{line} --schedule interleaved:group=4")
    assert depth_first.startswith("0F0 0F1 2F0 2F1 0F2")
    assert one_group.startswith("0F0 0F1 0F2 0F3 2F0")


def test_zero_bubble_prints_its_weight_gradients(fold3d):
    _, out, _ = fold3d("plan --schedule zb-h1 --pp 4 --microbatches 8 --compute-only")
    assert out.splitlines() == ZB_H1
    code, _, err = fold3d("plan --schedule zb-h1:wgrad=last@0 --pp 4 --microbatches 8")
    assert code == 2
    assert "wgrad=last@0 with --schedule zb-h1: it has all weight gradients apart" in err


def test_segments_can_recompute_early(fold3d):
    line = "plan --pp 1 --segments 2 --microbatches 1 --recompute full --compute-only"
    line += " --schedule aiao:recompute"
    assert fold3d(f"{line}=early@0")[1] == "0F0 1F0 1B0 0R0 0B0\n"
    assert fold3d(f"{line}=early")[1] == "0F0 1F0 1R0 1B0 0R0 0B0\n"
    code, _, err = fold3d(f"{line}=early@0,2")
    assert code == 2
    assert "recompute=early@0,2: there is no segment 2, a rank holds 2; give some of 0 to 1" in err


def test_more_forwards_run_ahead(fold3d):
    line = "plan --schedule 1f1b --pp 2 --microbatches 4 --compute-only"
    assert fold3d(f"{line} --schedule 1f1b:ahead=3")[1].startswith("0F0 0F1 0F2 0F3 0B0 0B1")
    line = "plan --schedule interleaved --pp 4 --segments 2 --microbatches 8 --compute-only"
    groups = f"{line} --schedule interleaved:group=8"
    assert fold3d(f"{groups}:ahead=2") == fold3d(groups)
    assert fold3d(f"{groups}:ahead=3") != fold3d(groups)
    # Rank 0 of two groups of four needs the last rank's results for more than eight ahead.
    first, _ = fold3d(f"{line} --schedule interleaved:ahead=9")[1].split("\n", 1)
    assert first.index("4B0") == first.index("4F3 0F4 0F5 0F6 0F7 4F4 4B0") + 24


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


def test_auto_prints_the_order_that_takes_least_time(fold3d):
    line = "plan --schedule 1f1b --pp 4 --microbatches 8 --compute-only"
    _, zero_bubble, _ = fold3d(line.replace("1f1b", "zb-h1"))
    _, placed, _ = fold3d(f"{line} --schedule 1f1b:wgrad=gaps")
    assert placed == zero_bubble  # a forward takes 1, a backward 1 and weight gradients 1
    line = line.replace("8", "16")
    _, further, _ = fold3d(f"{line} --schedule 1f1b:ahead=auto --seconds p2p=1.25")
    _, three, _ = fold3d(f"{line} --schedule 1f1b:ahead=3")
    assert further == three
    code, _, err = fold3d(f"{line} --seconds p2p=1")
    assert code == 2
    assert "--seconds without an auto" in err


def test_parameters_can_be_whole_only_while_their_stage_computes(fold3d):
    line = "plan --schedule aiao --pp 1 --segments 3 --microbatches 1 --shard-segments weights"
    code, out, err = fold3d(f"{line} --use-distributed-optimizer --compute-only")
    assert (code, err) == (0, "")
    assert out == (
        "0ALL_GATHER 1ALL_GATHER 0F0 0FREE_PARAM 2ALL_GATHER 1F0 2F0 2B0 2FREE_PARAM_B "
        "0ALL_GATHER_B 1B0 1FREE_PARAM_B 0B0 0FREE_PARAM_B\n"
    )

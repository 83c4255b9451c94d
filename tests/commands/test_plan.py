AIAO = "plan --schedule aiao --pp 2 --segments 2 --microbatches 3"


def test_plan_prints_one_line_per_rank(fold3d):
    assert fold3d.out(f"{AIAO} --compute-only").splitlines() == [
        "0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2",
        "1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1B0 1B1 1B2",
    ]


def test_plan_prints_transfers_and_gradient_sync_by_default(fold3d):
    assert fold3d.out("plan --schedule 1f1b --pp 2 --microbatches 2").splitlines() == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1 0ALL_REDUCE 0STEP",
        "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1ALL_REDUCE 1STEP",
    ]


def test_the_weight_gradients_of_a_segment_can_be_delayed(fold3d):
    line = "--schedule aiao:step=next:wgrad=last@1 --pp 1 --segments 2 --microbatches 2"
    assert fold3d.out(f"plan {line} --compute-only") == "0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1 1W0 1W1\n"
    # DP.sync starts between the weight gradients of a segment, and is no longer than they are.
    line = line.replace("step=next:wgrad=last", "wgrad=behind")
    assert fold3d.json(f"simulate {line} --seconds sum=2")["period_s"] == 4 + 4 + 2 + 2 + 2


def test_plan_as_json_holds_sizes_and_programs(fold3d):
    assert fold3d.json("plan --schedule 1f1b --pp 2 --microbatches 1 --compute-only") == {
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
    zero_bubble = fold3d.out(line.replace("1f1b", "zb-h1"))
    placed = fold3d.out(f"{line} --schedule 1f1b:wgrad=gaps")
    assert placed == zero_bubble  # a forward takes 1, a backward 1 and weight gradients 1
    line = line.replace("8", "16")
    further = fold3d.out(f"{line} --schedule 1f1b:ahead=auto --seconds p2p=1.25")
    assert further == fold3d.out(f"{line} --schedule 1f1b:ahead=3")
    assert "--seconds without an auto" in fold3d.refusal(f"{line} --seconds p2p=1")

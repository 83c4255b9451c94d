"""Each rule of the verifier, with the smallest plan that breaks it and the grid that shows it."""

import pytest

from megatron.fold3d.plan.ir import Plan, PlanError
from megatron.fold3d.plan.memory import peak_activations, peak_on_host
from megatron.fold3d.plan.passes.offload import add_offload
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from megatron.fold3d.plan.recompute_order import check_recompute_order
from megatron.fold3d.plan.schedules import (
    ONE_SEGMENT_SCHEDULES,
    SCHEDULES,
    SPLIT_SCHEDULES,
    build,
)
from megatron.fold3d.plan.verify import verify
from megatron.fold3d.plan.weight_order import check_oldest_first
from tests.plans import planned


def rejection(text: str) -> list[str]:
    with pytest.raises(PlanError) as caught:
        verify(Plan.from_text(text))
    return str(caught.value).splitlines()


def grid(lines: list[str]) -> list[list[str]]:
    """The cells of each rank that an error shows."""
    return [line.partition("|")[2].split() for line in lines]


def test_an_action_stands_on_the_rank_that_holds_its_stage():
    message, *cells = rejection("""\
        0F0 0B0 1B0
        1F0
    """)
    assert message == "stage 1 belongs to rank 1"
    assert grid(cells) == [["0F0", "0B0", ">1B0<"], ["1F0"]]


def test_an_action_appears_once():
    message, *cells = rejection("""\
        0F0 0F1 0B0 0B1
        1F0 1B0 1F1 1B0 1B1
    """)
    assert message == "1B0 appears more than once"
    assert grid(cells) == [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", ">1B0<", "1B1"]]


@pytest.mark.parametrize("lost", ["0F1", "0B0", "1B1", "0W1"])
def test_a_stage_runs_every_microbatch(lost: str):
    text = "0F0 0F1 0B0 0W0 0B1 0W1\n1F0 1B0 1W0 1F1 1B1 1W1"
    assert rejection(text.replace(lost, "")) == [
        f"{lost} is missing; a stage runs each micro-batch once"
    ]


def test_a_missing_microbatch_is_found_whatever_its_number():
    assert rejection("0F999999999") == ["0F0 is missing; a stage runs each micro-batch once"]
    assert rejection("1F0 1B0 0F1 0B1") == ["0F0 is missing; a stage runs each micro-batch once"]
    assert rejection("0F0\n999999999F0") == ["1F0 is missing; a stage runs each micro-batch once"]


def test_forwards_run_in_the_order_of_the_data():
    message, *cells = rejection("0F0 0F2 0F1 0B0 0B1 0B2")
    assert message == ("0F1 comes too late; a stage reads its data in the order of micro-batches")
    assert grid(cells) == [["0F0", "0F2", ">0F1<", "0B0", "0B1", "0B2"]]


def test_a_send_needs_its_receive():
    message, *cells = rejection("""\
        0F0 0SEND_F0 0RECV_B0 0B0
        1F0 1B0 1SEND_B0
    """)
    assert message == "0SEND_F0 has no 1RECV_F0 to go with it"
    assert grid(cells) == [["0F0", ">0SEND_F0<", "0RECV_B0", "0B0"], ["1F0", "1B0", "1SEND_B0"]]


def test_tensors_of_a_channel_are_received_in_the_order_of_their_sends():
    message, *cells = rejection("""\
        0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0RECV_B1 0B0 0B1
        1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1
    """)
    assert message == "0SEND_F1 meets 1RECV_F0; what is sent first must be received first"
    assert [[cell for cell in row if cell[0] == ">"] for row in grid(cells)] == [
        [">0SEND_F1<"],
        [">1RECV_F0<"],
    ]


def test_two_ranks_that_send_to_each_other_first_deadlock():
    # Both receives exist and both channels are in order; with buffered sends this plan would run.
    message, *cells = rejection("""\
        0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
        1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1
    """)
    assert message == (
        "deadlock: rank 0 waits at 0SEND_F1 for 1RECV_F1; rank 1 waits at 1SEND_B0 for 0RECV_B0"
    )
    assert grid(cells) == [
        ["0F0", "0F1", "0SEND_F0", ">0SEND_F1<", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
        ["1RECV_F0", "1F0", "1B0", ">1SEND_B0<", "1RECV_F1", "1F1", "1B1", "1SEND_B1"],
    ]


def test_a_compute_order_that_no_transfer_can_serve_is_refused():
    message, *_ = rejection("""\
        0F0 0B0 0F1 0B1
        1F0 1F1 1B1 1B0
    """)
    assert message.startswith("no rank can go on: rank 0 at 0B0, rank 1 at 1F1")


def test_transformer_engine_computes_the_oldest_weight_gradients_first():
    with pytest.raises(PlanError) as caught:
        check_oldest_first(Plan.from_text("0F0 0F1 0B0 0B1 0W1 0W0"))
    message, *cells = str(caught.value).splitlines()
    assert message.startswith("0W1 comes before 0W0, whose backward is older")
    assert grid(cells) == [["0F0", "0F1", "0B0", "0B1", ">0W1<", "0W0"]]
    for schedule in SPLIT_SCHEDULES:
        check_oldest_first(build(schedule, num_ranks=4, num_segments=1, num_microbatches=8))
    aiao = build("aiao", num_ranks=4, num_segments=3, num_microbatches=8)
    check_oldest_first(delay_weight_grads(aiao, (0, 2)))


def test_a_stage_recomputes_in_order_where_that_updates_a_mean():
    for text, found, before in (
        ("0F0 0F1 0R1 0R0 0B0 0B1", "0R1", "0R0"),
        ("0F0 0F1 0B1 0B0", "0B1", "0B0"),
        ("0F0 0F1 0R1 0B0 0B1", "0R1", "0B0"),
        ("0F0 0F1 0R0 0B1 0B0", "", ""),  # B1 recomputes, B0 has been recomputed
    ):
        plan = Plan.from_text(text)
        if not found:
            check_recompute_order(plan)
            continue
        with pytest.raises(PlanError) as caught:
            check_recompute_order(plan)
        message, *cells = str(caught.value).splitlines()
        assert message.startswith(f"{found} comes before {before}, and routers keep a mean")
        assert f">{found}<" in grid(cells)[0]


WHOLE = "0ALL_GATHER"
AGAIN = "0FREE_PARAM 0ALL_GATHER_B"
END = "0REDUCE_SCATTER 0STEP"
CARRIED = "0REDUCE_KEPT 0REDUCE_SCATTER 0FINALIZE"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0B1 0F1 0B0", "rank 0 waits at 0B1 for 0F1"),
        ("0F0 0F1 0B0 0W0 0B1 0ALL_REDUCE 0W1 0STEP", "rank 0 waits at 0ALL_REDUCE for 0W1"),
        ("0F0 0STEP 0B0 0ALL_REDUCE", "rank 0 waits at 0STEP for 0ALL_REDUCE"),
        (f"0F0 0ALL_GATHER 0B0 {END}", "rank 0 waits at 0F0 for 0ALL_GATHER"),
        (f"{WHOLE} 0F0 {AGAIN} 0FREE_PARAM_B 0B0 {END}", "rank 0 waits at 0FREE_PARAM_B for 0B0"),
        (f"{WHOLE} {AGAIN} 0F0 0B0 {END}", "rank 0 waits at 0FREE_PARAM for 0F0"),
        (f"{WHOLE} 0F0 0B0 {AGAIN} {END}", "rank 0 waits at 0B0 for 0ALL_GATHER_B"),
        (f"{WHOLE} 0F0 0R0 {AGAIN} 0B0 {END}", "rank 0 waits at 0R0 for 0ALL_GATHER_B"),
        ("0F0 0W0 0B0", "0W0 comes before 0B0, which leaves what it reads"),
        ("0OFFLOAD0 0F0 0RELOAD0 0B0", "rank 0 waits at 0OFFLOAD0 for 0F0"),
        ("0F0 0RELOAD0 0OFFLOAD0 0B0", "rank 0 waits at 0RELOAD0 for 0OFFLOAD0"),
        ("0F0 0OFFLOAD0 0B0 0RELOAD0", "rank 0 waits at 0B0 for 0RELOAD0"),
        ("0F0 0OFFLOAD0 0B0", "0B0 needs 0RELOAD0, which is missing"),
        ("0F0 0RELOAD0 0B0", "0RELOAD0 needs 0OFFLOAD0, which is missing"),
        ("0R0 0F0 0B0", "rank 0 waits at 0R0 for 0F0"),
        ("0F0 0B0 0R0", "rank 0 waits at 0B0 for 0R0"),
        ("0F0 0R0 0R0 0B0", "0R0 appears more than once"),
        ("0F0 0OFFLOAD0 0R0 0RELOAD0 0B0", "rank 0 waits at 0R0 for 0RELOAD0"),
        (f"0F0 0B0 0FREE_GRAD {END}", "rank 0 waits at 0FREE_GRAD for 0REDUCE_SCATTER"),
        (f"0F0 {END} 0FREE_GRAD 0B0", "rank 0 waits at 0REDUCE_SCATTER for 0B0"),
        (f"0STEP 0F0 0B0 {CARRIED} 0FREE_GRAD", "rank 0 waits at 0B0 for 0FREE_GRAD"),
        (f"0FREE_GRAD 0STEP 0F0 0B0 {CARRIED}", "rank 0 waits at 0FREE_GRAD for 0STEP"),
        (
            "0F0 0B0 0ALL_REDUCE 0FREE_GRAD 0STEP",
            "0FREE_GRAD needs 0REDUCE_SCATTER, which is missing",
        ),
    ],
)
def test_an_action_follows_what_it_needs(text: str, message: str):
    assert rejection(text)[0].removeprefix("deadlock: ") == message


def test_the_grid_shows_the_surroundings_of_the_marked_action():
    plan = planned(build("1f1b", num_ranks=16, num_segments=1, num_microbatches=64))
    lines = rejection(plan.to_text().replace("8B20 ", ""))
    assert lines == ["8B20 is missing; a stage runs each micro-batch once"]
    message, *cells = rejection(plan.to_text().replace(" 8SEND_B20 ", " "))
    assert message == "7RECV_B20 has no 8SEND_B20 to go with it"
    assert [line[:10] for line in cells] == ["  rank  6 ", "  rank  7 ", "  rank  8 "]
    assert [len(row) for row in grid(cells)] == [9, 9, 9]
    assert grid(cells)[1][4] == ">7RECV_B20<"


def sizes(schedule: str) -> list[tuple[int, int, int]]:
    segments = 1 if schedule in ONE_SEGMENT_SCHEDULES else 2
    return [(2, segments, 3), (3, segments, 3)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_plan_without_any_one_of_its_actions_is_refused(schedule: str):
    for pp, segments, microbatches in sizes(schedule):
        plan = planned(
            build(schedule, num_ranks=pp, num_segments=segments, num_microbatches=microbatches)
        )
        verify(plan)
        for rank, program in enumerate(plan.programs):
            for index, action in enumerate(program):
                shorter = list(plan.programs)
                shorter[rank] = program[:index] + program[index + 1 :]
                with pytest.raises(PlanError, match=str(action)):
                    verify(Plan(tuple(shorter)))


def test_offloaded_activations_count_until_the_next_computation_is_over():
    plan = Plan.from_text("0F0 0OFFLOAD0 0F1 0OFFLOAD1 0F2 0B2 0RELOAD1 0B1 0RELOAD0 0B0")
    verify(plan)
    assert peak_activations(plan) == (2,)
    plan = add_offload(Plan.from_text("0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3"))
    assert peak_activations(plan) == (3,)
    # Two that leave, one that is computed, two that come back.
    plan = add_offload(build("afab", num_ranks=1, num_segments=1, num_microbatches=9), depth=2)
    assert peak_activations(plan, depth=2) == (5,)


def test_host_memory_holds_activations_until_their_backward():
    plan = add_offload(Plan.from_text("0F0 0F1 0F2 1F0 1F1 1F2 1B0 1B1 1B2 0B0 0B1 0B2"))
    assert peak_on_host(plan.programs[0], {0: 100}) == {100: 3}
    assert peak_on_host(plan.programs[0], {0: 100, 1: 100}) == {100: 6}
    assert peak_on_host(plan.programs[0], {0: 100, 1: 50}) == {100: 3, 50: 3}


@pytest.mark.parametrize("lost", AGAIN.split())
def test_parameters_that_are_freed_are_gathered_again(lost: str):
    text = f"{WHOLE} 0F0 {AGAIN} 0B0 0FREE_PARAM_B {END}"
    verify(Plan.from_text(text))
    message, *_ = rejection(" ".join(word for word in text.split() if word != lost))
    assert message.startswith(f"{lost} is missing beside 0")

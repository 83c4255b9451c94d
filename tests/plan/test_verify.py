"""Each rule of the verifier, with the smallest plan that breaks it and the grid that shows it."""

import pytest

from megatron.fold3d.plan.ir import Plan, PlanError
from megatron.fold3d.plan.memory import peak_activations, peak_on_host
from megatron.fold3d.plan.passes.offload import add_offload
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from megatron.fold3d.plan.recompute_order import check_recompute_order
from megatron.fold3d.plan.schedules import ONE_SEGMENT_SCHEDULES, SCHEDULES, SPLIT_SCHEDULES
from megatron.fold3d.plan.verify import verify
from megatron.fold3d.plan.weight_order import check_oldest_first
from tests.plans import built, planned


def rejection(text: str) -> list[str]:
    with pytest.raises(PlanError) as caught:
        verify(Plan.from_text(text))
    return str(caught.value).splitlines()


def grid(lines: list[str]) -> list[list[str]]:
    """The cells of each rank that an error shows."""
    return [line.partition("|")[2].split() for line in lines]


@pytest.mark.parametrize(
    ("check", "text", "found", "reason"),
    [
        # What Transformer Engine computes, and what updates a mean where it is recomputed
        (check_oldest_first, "0F0 0F1 0B0 0B1 0W1 0W0", "0W1", "0W0, whose backward is older"),
        (check_recompute_order, "0F0 0F1 0R1 0R0 0B0 0B1", "0R1", "0R0, and routers keep a mean"),
        (check_recompute_order, "0F0 0F1 0B1 0B0", "0B1", "0B0, and routers keep a mean"),
        (check_recompute_order, "0F0 0F1 0R1 0B0 0B1", "0R1", "0B0, and routers keep a mean"),
    ],
)
def test_what_has_to_be_in_order_is_marked_where_it_is_not(check, text, found, reason):
    with pytest.raises(PlanError) as caught:
        check(Plan.from_text(text))
    message, *cells = str(caught.value).splitlines()
    assert message.startswith(f"{found} comes before {reason}")
    assert grid(cells) == [[f">{word}<" if word == found else word for word in text.split()]]


def test_weight_gradients_and_recomputations_in_order_are_accepted():
    for schedule in SPLIT_SCHEDULES:
        check_oldest_first(built(schedule, 4, 1, 8))
    check_oldest_first(delay_weight_grads(built("aiao", 4, 3, 8), (0, 2)))
    # B1 recomputes, B0 has been recomputed
    check_recompute_order(Plan.from_text("0F0 0F1 0R0 0B1 0B0"))


def test_the_grid_shows_the_surroundings_of_the_marked_action():
    plan = planned(built("1f1b", 16, 1, 64))
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
        plan = planned(built(schedule, pp, segments, microbatches))
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
    plan = add_offload(built("afab", 1, 1, 9), depth=2)
    assert peak_activations(plan, depth=2) == (5,)


def test_host_memory_holds_activations_until_their_backward():
    plan = add_offload(Plan.from_text("0F0 0F1 0F2 1F0 1F1 1F2 1B0 1B1 1B2 0B0 0B1 0B2"))
    assert peak_on_host(plan.programs[0], {0: 100}) == {100: 3}
    assert peak_on_host(plan.programs[0], {0: 100, 1: 100}) == {100: 6}
    assert peak_on_host(plan.programs[0], {0: 100, 1: 50}) == {100: 3, 50: 3}

"""What plans of DP.sync look like, feature by feature, and what the verifier says of wrong ones."""

import re
from functools import partial
from typing import Any, NamedTuple

import pytest

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.files import from_csv, parse_plan, to_csv
from megatron.fold3d.plan.ir import Plan, PlanError
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.plan.verify import verify
from tests.plans import planned

TWO = "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1"
THREE = "0F0 1F0 2F0 2B0 1B0 0B0"
CARRIED: dict[str, Any] = {"parts": "step=next"}
SHARDED: dict[str, Any] = {"gathers_params": True}
LATER = Choice.plain("plan", 2).changed((1,), step="next")


class Example(NamedTuple):
    """A plan, the order that it is made of, and what of `planned` makes it."""

    text: str
    order: str
    made_with: dict[str, Any] | None
    """None: nothing places sums like this; a plan file may."""


EXAMPLES = {
    "all-reduce": Example(
        "0F0 0F1 1F0 1F1 1B0 1B1 1ALL_REDUCE 0B0 0B1 0ALL_REDUCE 1STEP 0STEP", TWO, {}
    ),
    "carried, 0.6 of segment 1 in its iteration": Example(
        "1ALL_REDUCE 0STEP 0F0 0F1 1STEP 1F0 1F1 1B0 1B1 1REDUCE_KEPT 1ALL_REDUCE:600 "
        "0B0 0B1 0REDUCE_KEPT 0ALL_REDUCE 1FINALIZE 0FINALIZE",
        TWO,
        CARRIED | {"shares": (1.0, 0.6)},
    ),
    "carried, distributed optimizer, the rest behind an all-gather": Example(
        "0STEP 0ALL_GATHER 1REDUCE_SCATTER 0F0 1STEP 1ALL_GATHER 0F1 1F0 1F1 1B0 1B1 "
        "1REDUCE_KEPT 1REDUCE_SCATTER:600 0B0 0B1 0REDUCE_KEPT 0REDUCE_SCATTER "
        "1FINALIZE 0FINALIZE",
        TWO,
        CARRIED | SHARDED | {"shares": (1.0, 0.6), "parameter_share": 0.4},
    ),
    "parts between weight gradients": Example(
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3 0W:250 0ALL_REDUCE:250 0W:500 0ALL_REDUCE:500 "
        "0W:750 0ALL_REDUCE:750 0W:1000 0ALL_REDUCE 0STEP",
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        {"parts": "wgrad=behind", "reduces_early": True},
    ),
    "parts of a carried stage": Example(
        "0STEP 0F0 0F1 0B0 0B1 0W:500 0ALL_REDUCE:500 0W:1000 0REDUCE_KEPT 0ALL_REDUCE:600 "
        "0ALL_REDUCE 0FINALIZE",
        "0F0 0F1 0B0 0B1",
        {"parts": "step=next:wgrad=behind", "reduces_early": True, "shares": (0.6,)},
    ),
    "weight gradients by micro-batch, behind all backwards": Example(
        "0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1 0ALL_REDUCE 1W0 1W1 1ALL_REDUCE 0STEP 1STEP",
        TWO,
        {"parts": "wgrad=last@1"},
    ),
    "distributed optimizer": Example(
        "0ALL_GATHER 1ALL_GATHER 0F0 0F1 1F0 1F1 1B0 1B1 1REDUCE_SCATTER 0B0 0B1 0REDUCE_SCATTER "
        "1STEP 0STEP",
        TWO,
        SHARDED,
    ),
    "distributed optimizer, all-gathers by DDP's hooks": Example(
        "0F0 0F1 1F0 1F1 1B0 1B1 1REDUCE_SCATTER 0B0 0B1 0REDUCE_SCATTER 1STEP 0STEP",
        TWO,
        {"steps_shards": True},
    ),
    "segment 1 of three is replicated": Example(
        "0ALL_GATHER 2ALL_GATHER 0F0 1F0 2F0 2B0 2REDUCE_SCATTER 1B0 1ALL_REDUCE "
        "0B0 0REDUCE_SCATTER 2STEP 1STEP 0STEP",
        THREE,
        SHARDED | {"parts": "optimizer=replicated@1"},
    ),
    "parameters in shards": Example(
        "0ALL_GATHER 1ALL_GATHER 0F0 0FREE_PARAM 2ALL_GATHER 1F0 2F0 2B0 2REDUCE_SCATTER "
        "2FREE_PARAM_B 0ALL_GATHER_B 1B0 1REDUCE_SCATTER 1FREE_PARAM_B 0B0 0REDUCE_SCATTER "
        "0FREE_PARAM_B 2STEP 1STEP 0STEP",
        THREE,
        {"shards": "weights"},
    ),
    "gradients in shards": Example(
        "0ALL_GATHER 1ALL_GATHER 0F0 0FREE_PARAM 2ALL_GATHER 1F0 2F0 2B0 2REDUCE_SCATTER "
        "2FREE_PARAM_B 0ALL_GATHER_B 1B0 1REDUCE_SCATTER 1FREE_PARAM_B 2FREE_GRAD 0B0 "
        "0REDUCE_SCATTER 0FREE_PARAM_B 2STEP 1STEP 0STEP",
        THREE,
        {"shards": "gradients"},
    ),
    "gradients in shards, carried": Example(
        "0STEP 0FREE_GRAD 0ALL_GATHER 1STEP 1FREE_GRAD 1ALL_GATHER 0F0 1F0 1B0 "
        "1REDUCE_KEPT 1REDUCE_SCATTER 1FREE_PARAM_B 0B0 0REDUCE_KEPT 0REDUCE_SCATTER "
        "0FREE_PARAM_B 1FINALIZE 0FINALIZE",
        "0F0 1F0 1B0 0B0",
        CARRIED | {"shards": "gradients"},
    ),
    "slices for one hardware queue": Example(
        "0F0 0F1 1F0 1F1 1B0 1B1 1ALL_REDUCE:500 0B0 1ALL_REDUCE 0B1 0ALL_REDUCE 1STEP 0STEP",
        TWO,
        {"parts": "slices=on"},
    ),
    "slices, carried": Example(
        "0STEP 1ALL_REDUCE:750 0F0 1ALL_REDUCE 0F1 1STEP 1F0 1F1 1B0 1B1 1REDUCE_KEPT "
        "1ALL_REDUCE:250 0B0 1ALL_REDUCE:500 0B1 0REDUCE_KEPT 0ALL_REDUCE 1FINALIZE 0FINALIZE",
        TWO,
        {"parts": "step=next:slices=on", "shares": (0.5, 0.5)},
    ),
    "tied embeddings, carried, with a rest of the first stage": Example(
        "1ALL_REDUCE 0STEP 0F0 1STEP 1F0 1B0 1REDUCE_KEPT 1ALL_REDUCE:600 0B0 0REDUCE_KEPT "
        "0ALL_REDUCE:300 0ALL_REDUCE 1FINALIZE 0FINALIZE",
        "0F0 1F0 1B0 0B0",
        CARRIED | {"shares": (0.3, 0.6)},
    ),
    "offloaded and recomputed": Example(
        "0F0 0OFFLOAD0 0F1 1F0 1F1 1B0 1B1 1ALL_REDUCE 0RELOAD0 0R0 0B0 0R1 0B1 0ALL_REDUCE "
        "1STEP 0STEP",
        TWO,
        None,
    ),
    "one carried, one not": Example(
        "1ALL_REDUCE 0F0 1STEP 1F0 1B0 1REDUCE_KEPT 1ALL_REDUCE:300 0B0 0ALL_REDUCE 1FINALIZE "
        "0STEP",
        "0F0 1F0 1B0 0B0",
        {"parts": LATER, "shares": (1.0, 0.3)},
    ),
    "a whole sum that starts in the next iteration": Example(
        "1ALL_REDUCE 0STEP 0F0 1STEP 1F0 1B0 1REDUCE_KEPT 0B0 0REDUCE_KEPT 0ALL_REDUCE "
        "1FINALIZE 0FINALIZE",
        "0F0 1F0 1B0 0B0",
        CARRIED | {"shares": (1.0, 0.0)},
    ),
    "two ranks with transfers": Example(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0RECV_B1 0B0 0B1 0ALL_REDUCE 0STEP\n"
        "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1ALL_REDUCE 1STEP",
        "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1",
        {},
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_reads_back_runs_and_is_what_the_passes_make(name: str):
    text, order, made_with = EXAMPLES[name]
    plan = Plan.from_text(text)
    assert plan.to_text() == f"{text}\n"
    assert from_csv(to_csv(plan)) == plan
    verify(plan)
    if made_with is not None:
        assert planned(Plan.from_text(order), **made_with).to_text() == plan.to_text()


def test_what_is_offloaded_and_recomputed_is_not_told_by_the_words():
    made = partial(planned, parts="recompute=early@0", offload=OffloadChoice())
    verify(plan := made(Plan.from_text(TWO)))
    assert made(plan) == plan


WHOLE = "0ALL_GATHER"
AGAIN = "0FREE_PARAM 0ALL_GATHER_B"
END = "0REDUCE_SCATTER 0STEP"
CARRIED = "0REDUCE_KEPT 0REDUCE_SCATTER 0FINALIZE"
WRONG = [
    ("0F0 0F1 0B0 0ALL_REDUCE 0B1 0STEP", "deadlock: rank 0 waits at 0ALL_REDUCE for 0B1"),
    ("0F0 0STEP 0F1 0B0 0B1 0ALL_REDUCE", "deadlock: rank 0 waits at 0STEP for 0ALL_REDUCE"),
    ("0F0 0B0 0STEP 0ALL_REDUCE", "deadlock: rank 0 waits at 0STEP for 0ALL_REDUCE"),
    (
        "0F0 0B0 0W:500 0ALL_REDUCE 0W:1000 0STEP",
        "deadlock: rank 0 waits at 0ALL_REDUCE for 0W:1000",
    ),
    (
        "0F0 0B0 0ALL_REDUCE:500 0STEP",
        "0ALL_REDUCE:500 is the last part; the sums of a stage end at 1000",
    ),
    (
        "0STEP 0F0 0B0 0REDUCE_KEPT 0ALL_REDUCE:500 0ALL_REDUCE 0ALL_REDUCE:700 0FINALIZE",
        "0ALL_REDUCE:700 comes after 0ALL_REDUCE, which ends with all that is left",
    ),
    (
        "0F0 0B0 0ALL_REDUCE:700 0ALL_REDUCE:500 0ALL_REDUCE 0STEP",
        "0ALL_REDUCE:500 comes after 0ALL_REDUCE:700; a part begins where the last one ends",
    ),
    (
        "0STEP 0ALL_REDUCE 0F0 0B0 0REDUCE_KEPT 0ALL_REDUCE:600 0FINALIZE",
        "0ALL_REDUCE:600 comes after 0ALL_REDUCE, which ends with all that is left",
    ),
    (
        "0ALL_GATHER 0F0 1F0 1B0 1REDUCE_SCATTER 0B0 0REDUCE_SCATTER 1STEP 0STEP",
        "1ALL_GATHER is missing; replicas step shards of the stage",
    ),
    ("0ALL_GATHER 0F0 0B0 0REDUCE_SCATTER", "0STEP is missing; what is summed is stepped"),
    (
        "0ALL_GATHER 0F0 0B0",
        "0REDUCE_SCATTER is missing; what is stepped is summed over the replicas",
    ),
    (
        "0ALL_GATHER 0STEP 0F0 0B0 0REDUCE_KEPT 0REDUCE_SCATTER 0FINALIZE",
        "deadlock: rank 0 waits at 0ALL_GATHER for 0STEP",
    ),
    (
        "0ALL_GATHER 0F0 0B0 0ALL_REDUCE 0STEP",
        "0ALL_GATHER of a stage that is all-reduced: every replica has stepped all of it",
    ),
    (
        "0ALL_GATHER 0F0 0B0 0REDUCE_SCATTER:500 0ALL_REDUCE 0STEP",
        "0REDUCE_SCATTER:500 beside 0ALL_REDUCE: a stage is summed in one way",
    ),
    (
        "0ALL_GATHER 0F0 0FREE_PARAM 0F1 0ALL_GATHER_B 0B0 0B1 0REDUCE_SCATTER 0STEP",
        "deadlock: rank 0 waits at 0FREE_PARAM for 0F1",
    ),
    (
        "0STEP 0F0 0B0 0ALL_REDUCE 0FINALIZE",
        "0REDUCE_KEPT is missing beside 0STEP, which ends DP.sync of the iteration before",
    ),
    (
        "0STEP 0F0 0B0 0REDUCE_KEPT 0ALL_REDUCE",
        "0FINALIZE is missing beside 0STEP, which ends DP.sync of the iteration before",
    ),
    (
        "0STEP 0F0 0B0 0FINALIZE 0REDUCE_KEPT 0ALL_REDUCE",
        "deadlock: rank 0 waits at 0FINALIZE for 0REDUCE_KEPT",
    ),
    (
        "0F0 0B0 0REDUCE_KEPT 0ALL_REDUCE 0FINALIZE 0STEP",
        "0REDUCE_KEPT of a stage whose step is at the end, where all sums have ended",
    ),
    (
        "0F0 0F1 0B0 0ALL_REDUCE:250 0B1 0ALL_REDUCE 0STEP",
        "deadlock: rank 0 waits at 0ALL_REDUCE:250 for 0B1",
    ),
    (
        "0F0 0B0 0ALL_REDUCE:250 0ALL_REDUCE:250 0ALL_REDUCE 0STEP",
        "0ALL_REDUCE:250 appears more than once",
    ),
    (
        "0ALL_REDUCE:250 0F0 0STEP 0B0 0ALL_REDUCE",
        "deadlock: rank 0 waits at 0ALL_REDUCE:250 for 0B0",
    ),
    # Of ranks and micro-batches.
    ("0F0 0B0 1B0\n1F0", "stage 1 belongs to rank 1"),
    ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B0 1B1", "1B0 appears more than once"),
    ("0F0 0B0 0W0 0B1 0W1\n1F0 1B0 1W0 1F1 1B1 1W1", "0F1 is missing; a stage runs each micro-"),
    ("0F0 0F1 0B0 0W0 0B1\n1F0 1B0 1W0 1F1 1B1 1W1", "0W1 is missing; a stage runs each micro-"),
    ("0F999999999", "0F0 is missing; a stage runs each micro-batch once"),
    ("0F0\n999999999F0", "1F0 is missing; a stage runs each micro-batch once"),
    ("0F0 0F2 0F1 0B0 0B1 0B2", "0F1 comes too late; a stage reads its data in the order of"),
    ("0F0 0B0 0F1 0B1\n1F0 1F1 1B1 1B0", "no rank can go on: rank 0 at 0B0, rank 1 at 1F1"),
    # Of transfers. With buffered sends the last one would run.
    ("0F0 0SEND_F0 0RECV_B0 0B0\n1F0 1B0 1SEND_B0", "0SEND_F0 has no 1RECV_F0 to go with it"),
    ("0F0 0RECV_B0 0B0\n1F0 1B0 1SEND_B0", "1F0 needs 0SEND_F0, which is missing"),
    (
        "0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0RECV_B1 0B0 0B1\n"
        "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
        "0SEND_F1 meets 1RECV_F0; what is sent first must be received first",
    ),
    (
        "0F0 0F1 0SEND_F0 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\n"
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
        "rank 0 waits at 0SEND_F1 for 1RECV_F1; rank 1 waits at 1SEND_B0 for 0RECV_B0",
    ),
    # Of shards, copies and recomputation.
    (f"{WHOLE} 0F0 0ALL_GATHER_B 0B0 0FREE_PARAM_B {END}", "0FREE_PARAM is missing beside 0"),
    (f"{WHOLE} 0F0 0FREE_PARAM 0B0 0FREE_PARAM_B {END}", "0ALL_GATHER_B is missing beside 0"),
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
    ("0F0 0B0 0ALL_REDUCE 0FREE_GRAD 0STEP", "0FREE_GRAD needs 0REDUCE_SCATTER, which is missing"),
]


@pytest.mark.parametrize(("text", "reason"), WRONG)
def test_a_wrong_plan_is_refused_with_the_wrong_action_marked(text: str, reason: str):
    with pytest.raises(PlanError) as refused:
        verify(Plan.from_text(text))
    message, *grid = str(refused.value).splitlines()
    assert message.removeprefix("deadlock: ").startswith(reason.removeprefix("deadlock: "))
    marked = re.findall(r">(\S+)<", "\n".join(grid))
    assert marked or re.search("is missing|no rank can go on", reason)
    assert all(re.search(rf"\b{one}\b|{one[0]}\b", reason) for one in marked)


def test_reductions_of_a_table_are_torchs():
    plan = parse_plan(b"0F0,0B0,0REDUCE_GRAD\n1F0,1B0,1REDUCE_GRAD")
    assert plan.to_text() == "0F0 0B0 0ALL_REDUCE 0STEP\n1F0 1B0 1ALL_REDUCE 1STEP\n"

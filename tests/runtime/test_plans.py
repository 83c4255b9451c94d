"""Plans of a run: from a plan file, with ``step=next``, ``wgrad=`` and activations that leave."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fold3d.config.fold3d_config import Fold3DConfig, Switch
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.ir import PlanError
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.runtime.offload.offloader import Offloader
from megatron.fold3d.runtime.plans import Plans
from tests.configs import configured

LATER = ":step=next:share=0.5"
BETWEEN = r"stage 0's DP.sync between its weight gradients"
Written = Callable[[str], str]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """Write the run's plan file; returns the order that names it."""

    def write(text: str) -> str:
        (tmp_path / "plan").write_text(text)
        return f"plan={tmp_path / 'plan'}"

    return write


def plans(word: str, num_segments: int = 1, **given: object) -> Plans:
    choice = Choice.parse(word, num_segments)
    return Plans(configured(choice=choice, grad_sync="overlap", **given))


def training(made: Plans, num_microbatches: int = 1) -> str:
    return made.training(made.job(num_microbatches)).to_text()


def test_an_iteration_that_may_be_clipped_ends_its_sums():
    made = plans(f"1f1b{LATER}", num_ranks=2)
    clipped = made.job(1).in_iteration
    assert not clipped.choice.carries
    assert "0ALL_REDUCE 0STEP" in made.training(clipped).to_text()
    assert made.job(1).choice.carries  # what `auto` searches from


def test_a_plan_file_may_defer_what_the_run_may(written: Written):
    deferred = training(plans(f"1f1b{LATER}", num_ranks=2))
    order = written(deferred)
    assert training(plans(f"{order}{LATER}", num_ranks=2)) == deferred
    with pytest.raises(PlanError, match="found 0STEP before 0F0"):
        training(plans(order, num_ranks=2))


def test_a_plan_file_sums_as_the_optimizer_steps(written: Written):
    text = "0F0 0B0 0ALL_REDUCE 0STEP\n"
    order = written(text)
    assert training(plans(order)) == text
    fix = "found 0ALL_REDUCE; with --use-distributed-optimizer it is 0REDUCE_SCATTER: write"
    with pytest.raises(PlanError, match=fix):
        training(plans(order, steps_shards=True))


@pytest.mark.parametrize("text", ["0F0 0B0 0W0", "0F0 0B0"])
def test_a_plan_file_may_delay_weight_gradients_if_the_run_does(written: Written, text: str):
    lowered = "0F0 0B0 0W0 0ALL_REDUCE 0STEP\n"
    assert training(plans(f"{written(text)}:wgrad=last")) == lowered


def test_a_plan_file_may_reduce_between_weight_gradients_if_the_run_can(written: Written):
    text = "0F0 0F1 0B0 0B1 0W:500 0ALL_REDUCE:500 0W:1000 0ALL_REDUCE 0STEP\n"
    word = f"{written(text)}:wgrad=last:slices=on"
    assert training(plans(word, reduces_early=True), 2) == text
    with pytest.raises(PlanError, match=BETWEEN):
        training(plans(word), 2)
    carried = text.replace("0ALL_REDUCE 0STEP", "0REDUCE_KEPT 0ALL_REDUCE 0FINALIZE")
    written(f"0STEP {carried}")
    with pytest.raises(PlanError, match=BETWEEN):
        training(plans(f"{word}{LATER}", reduces_early=True), 2)


def test_a_deferring_run_in_slices_does_not_reduce_early_as_well():
    word = f"aiao{LATER}:wgrad=behind@1:wgrad=last@0:slices=on"
    text = training(plans(word, 2, reduces_early=True), 2)
    assert "W:" not in text
    assert "1B1 1W0 1W1 1REDUCE_KEPT 1ALL_REDUCE:125 0B0 1ALL_REDUCE:250 0B1" in text


def offloading(order: str, offload: Switch = "auto") -> Fold3DConfig:
    job = None if offload == "off" else OffloadChoice()
    choice = Choice.plain(order, num_segments=1)
    return configured(choice=choice, offload_activations=offload, offload=job)


def choosing(wanted: Fold3DConfig, chosen: OffloadChoice) -> tuple[Plans, Offloader]:
    made = Plans(wanted)
    offloader = Offloader(wanted, made)
    offloader._chosen[6, False, False] = chosen  # for six computations that are not measured
    return made, offloader


def test_what_leaves_is_chosen_anew_in_each_iteration():
    made, offloader = choosing(offloading("afab"), OffloadChoice(at_most=0, depth=2))
    job = made.job(3)
    assert "OFFLOAD2" in training(made, 3)
    kept = offloader.decide(job, 0)
    assert offloader.depth == 2
    assert made.training(kept).to_text() == "0F0 0F1 0F2 0B0 0B1 0B2 0ALL_REDUCE 0STEP\n"


def test_a_plan_file_says_itself_what_leaves(written: Written):
    order = written("0F0 0OFFLOAD0 0F1 0F2 0RELOAD0 0B2 0B1 0B0\n")
    made, offloader = choosing(offloading(order), OffloadChoice(at_most=0))
    job = made.job(3)
    assert offloader.decide(job, 0) == job
    assert made.training(job) == made.training(replace(job, offload=OffloadChoice(at_most=0)))
    with pytest.raises(PlanError, match="found OFFLOAD in the plan; give --offload-activations on"):
        Plans(offloading(order, "off")).job(3)

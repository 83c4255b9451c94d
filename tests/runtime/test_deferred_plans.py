"""Plans of a run with ``step=next`` and ``wgrad=``."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.ir import Plan, PlanError
from megatron.fold3d.runtime.plans import Plans
from tests.configs import configured


def plans(share: float | None, file: Path | None = None) -> Plans:
    parts = "" if share is None else f":step=next:share={share}"
    choice = Choice.parse(("1f1b" if file is None else f"plan={file}") + parts, 1)
    return Plans(configured(choice=choice, num_ranks=2, grad_sync="overlap"))


def training(plans: Plans, num_microbatches: int) -> Plan:
    return plans.training(plans.job(num_microbatches))


def test_an_iteration_that_may_be_clipped_ends_its_sums():
    made = plans(0.5)
    clipped = made.job(1).in_iteration
    assert not clipped.choice.carries
    assert "0ALL_REDUCE 0STEP" in made.training(clipped).to_text()
    assert made.job(1).choice.carries  # what `auto` searches from


def test_a_plan_file_may_defer_what_the_run_may(tmp_path: Path):
    path = tmp_path / "plan"
    path.write_text(training(plans(0.5), 1).to_text())

    assert training(plans(0.5, path), 1) == training(plans(0.5), 1)
    with pytest.raises(PlanError, match="found 0STEP before 0F0"):
        training(plans(None, path), 1)


def test_a_plan_file_sums_as_the_optimizer_steps(tmp_path: Path):
    path = tmp_path / "plan"
    path.write_text("0F0 0B0 0ALL_REDUCE 0STEP\n")
    whole = configured(choice=Choice.parse(f"plan={path}", 1), grad_sync="overlap")
    assert training(Plans(whole), 1).to_text() == path.read_text()
    fix = "found 0ALL_REDUCE; with --use-distributed-optimizer it is 0REDUCE_SCATTER: write"
    with pytest.raises(PlanError, match=fix):
        training(Plans(configured(whole, steps_shards=True)), 1)


def test_a_plan_file_may_delay_weight_gradients_if_the_run_does(tmp_path: Path):
    path = tmp_path / "plan"
    path.write_text("0F0 0B0 0W0")
    whole = tmp_path / "whole"
    whole.write_text("0F0 0B0")

    lowered = "0F0 0B0 0W0 0ALL_REDUCE 0STEP\n"
    for file in (path, whole):
        wanted = configured(choice=Choice.parse(f"plan={file}:wgrad=last", 1))
        assert training(Plans(wanted), 1).to_text() == lowered


def test_a_plan_file_may_reduce_between_weight_gradients_if_the_run_can(tmp_path: Path):
    path = tmp_path / "plan"
    text = "0F0 0F1 0B0 0B1 0W:500 0ALL_REDUCE:500 0W:1000 0ALL_REDUCE 0STEP\n"
    path.write_text(text)
    wanted = configured(
        choice=Choice.parse(f"plan={path}:wgrad=last:slices=on", 1),
        grad_sync="overlap",
        reduces_early=True,
    )

    assert training(Plans(wanted), 2).to_text() == text
    with pytest.raises(PlanError, match=r"stage 0's DP.sync between its weight gradients"):
        training(Plans(configured(wanted, reduces_early=False)), 2)
    carried = text.replace("0ALL_REDUCE 0STEP", "0REDUCE_KEPT 0ALL_REDUCE 0FINALIZE")
    path.write_text(f"0STEP {carried}")
    deferred = replace(wanted.choice.changed(step="next"), share=0.5)
    with pytest.raises(PlanError, match=r"stage 0's DP.sync between its weight gradients"):
        training(Plans(configured(wanted, choice=deferred)), 2)


REDUCES_EARLY = configured(
    choice=Choice.parse("aiao:step=next:share=0.5:wgrad=behind@1:wgrad=last@0", 2),
    grad_sync="overlap",
    reduces_early=True,
)


def test_a_deferring_run_in_slices_does_not_reduce_early_as_well():
    sliced = configured(REDUCES_EARLY, choice=replace(REDUCES_EARLY.choice, slices=True))
    text = training(Plans(sliced), 2).to_text()
    assert "W:" not in text
    assert "1B1 1W0 1W1 1REDUCE_KEPT 1ALL_REDUCE:125 0B0 1ALL_REDUCE:250 0B1" in text

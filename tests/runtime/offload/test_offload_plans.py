"""Plans of a run with ``--offload-activations``."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fold3d.config.fold3d_config import Offload
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.ir import PlanError
from megatron.fold3d.plan.passes.offload import OffloadChoice
from megatron.fold3d.runtime.plans import Plans
from tests.configs import CONFIG


def plans(offload: Offload, file: Path | None = None) -> Plans:
    choice = Choice.plain("afab" if file is None else f"plan={file}", num_segments=1)
    return Plans(replace(CONFIG, choice=choice, offload_activations=offload))


def test_what_leaves_is_chosen_anew_and_the_latest_plan_is_the_one_that_trains():
    made = plans("auto")
    assert "OFFLOAD2" in made.training(3).to_text()
    kept = made.training(3, OffloadChoice(at_most=0))
    assert kept.to_text() == "0F0 0F1 0F2 0B0 0B1 0B2 0ALL_REDUCE 0STEP\n"
    made.evaluation(3)
    assert made.latest == kept
    assert not made.fixes_offload


def test_a_plan_file_says_itself_what_leaves(tmp_path: Path):
    path = tmp_path / "plan"
    path.write_text("0F0 0OFFLOAD0 0F1 0F2 0RELOAD0 0B2 0B1 0B0\n")
    made = plans("auto", path)
    assert made.training(3) == made.training(3, OffloadChoice(at_most=0, depth=2))
    assert made.fixes_offload
    with pytest.raises(PlanError, match="found OFFLOAD in the plan; give --offload-activations on"):
        plans("off", path).training(3)

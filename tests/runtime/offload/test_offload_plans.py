"""Plans of a run with ``--offload-activations``."""

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


def config(offload: Switch, file: Path | None = None) -> Fold3DConfig:
    choice = Choice.plain("afab" if file is None else f"plan={file}", num_segments=1)
    job = None if offload == "off" else OffloadChoice()
    return configured(choice=choice, offload_activations=offload, offload=job)


def choosing(wanted: Fold3DConfig, chosen: OffloadChoice) -> tuple[Plans, Offloader]:
    plans = Plans(wanted)
    offloader = Offloader(wanted, plans)
    offloader._chosen[6, False, False] = chosen  # for six computations that are not measured
    return plans, offloader


def test_what_leaves_is_chosen_anew_in_each_iteration():
    plans, offloader = choosing(config("auto"), OffloadChoice(at_most=0, depth=2))
    job = plans.job(3)
    assert "OFFLOAD2" in plans.training(job).to_text()
    kept = offloader.decide(job, 0)
    assert offloader.depth == 2
    assert plans.training(kept).to_text() == "0F0 0F1 0F2 0B0 0B1 0B2 0ALL_REDUCE 0STEP\n"


def test_a_plan_file_says_itself_what_leaves(tmp_path: Path):
    path = tmp_path / "plan"
    path.write_text("0F0 0OFFLOAD0 0F1 0F2 0RELOAD0 0B2 0B1 0B0\n")
    plans, offloader = choosing(config("auto", path), OffloadChoice(at_most=0))
    job = plans.job(3)
    assert offloader.decide(job, 0) == job
    assert plans.training(job) == plans.training(replace(job, offload=OffloadChoice(at_most=0)))
    with pytest.raises(PlanError, match="found OFFLOAD in the plan; give --offload-activations on"):
        Plans(config("off", path)).job(3)

"""What ``pairs=on`` accepts."""

import pytest

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.ir import PlanError
from megatron.fold3d.plan.passes.pairs import check_pairs
from megatron.fold3d.runtime.plans import Plans
from tests.configs import configured

MORE = (
    "--attention-dropout 0 --hidden-dropout 0 --transformer-impl local "
    "--tensor-model-parallel-size 2"
)


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("interleaved:pairs=on --microbatch-group-size-per-virtual-pipeline-stage 3", 3),
        ("interleaved:pairs=on:group=2", 2),
    ],
)
def test_a_group_is_of_whole_pairs(refused, line: str, size: int):
    refused(f"--segments 2 --schedule {line}", f"^pairs=on with groups of {size} micro-batches: ")


def test_a_run_without_a_pair_is_refused():
    paired = configured(choice=Choice.parse("aiao:pairs=on", 1))
    plans = Plans(paired)
    check_pairs(plans.training(plans.job(2)))
    with pytest.raises(PlanError, match=r"no pair in a plan of 1 micro-batches; .*raise"):
        check_pairs(plans.training(plans.job(1)))

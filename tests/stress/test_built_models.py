"""A sample of the jobs of `tests.stress.built_models`; `make stress` draws more."""

import pytest

from tests.distributed import run_distributed
from tests.stress.built_models import Job, compared

SEED = "sample"
JOBS = 15


@pytest.mark.gloo
def test_megatron_builds_the_parameters_and_gradients_that_the_planner_counts() -> None:
    (found,) = run_distributed(_compared, 1)
    assert [(job, differences) for job, differences in found if differences] == []
    flags = " ".join(job.flags for job, _ in found)
    for kind in (
        *("--num-experts", "--multi-latent-attention", "--pipeline-model-parallel-layout E|"),
        *("--untie-", "--expert-tensor-parallel-size 1", "--grad-reduce-in-bf16", "--fp16"),
    ):
        assert kind in flags


def _compared() -> list[tuple[Job, tuple[str, ...]]]:
    return [*compared(SEED, JOBS)]

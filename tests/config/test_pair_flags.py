"""What ``pairs=on`` accepts."""

import re

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
AIAO = "--segments 2 --schedule aiao"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall"
)


def test_pairs_are_off_unless_asked_for(config):
    assert not config(AIAO).choice.pairs
    assert config(f"{AIAO} --schedule aiao:pairs=on").choice.pairs


def test_experts_of_transformer_engine_are_paired_without_tensor_parallelism(config):
    line = (
        f"{AIAO}:pairs=on {EXPERTS} --tensor-model-parallel-size 1 --moe-grouped-gemm "
        "--transformer-impl transformer_engine"
    )
    assert config(line).choice.pairs


REFUSED = {
    "--schedule stock": "--schedule stock",
    f"{AIAO} --tensor-model-parallel-size 1": "--tensor-model-parallel-size 1",
    f"{AIAO} --attention-dropout 0.1": "--attention-dropout 0.1",
    f"{AIAO} --hidden-dropout 0.1": "--hidden-dropout 0.1",
    f"{AIAO} --transformer-impl transformer_engine": (
        "--transformer-impl transformer_engine and --tensor-model-parallel-size 2"
    ),
    f"{AIAO} --fp8-format hybrid": "--fp8-format hybrid",
    f"{AIAO} --te-rng-tracker": "--te-rng-tracker",
    f"{AIAO} --recompute-granularity selective --recompute-modules mla_up_proj": (
        "--recompute-modules mla_up_proj and --tensor-model-parallel-size 2"
    ),
    f"{AIAO} {EXPERTS} --moe-token-dispatcher-type allgather": (
        "--num-experts 4 and --moe-token-dispatcher-type allgather"
    ),
    f"{AIAO} {EXPERTS} --moe-input-jitter-eps 0.1": (
        "--num-experts 4 and --moe-input-jitter-eps 0.1"
    ),
    f"{AIAO} {EXPERTS} --moe-router-force-biased 0": (
        "--num-experts 4 and --moe-router-force-biased 0.0"
    ),
    f"{AIAO} --mtp-num-layers 1": "--mtp-num-layers 1",
    f"{AIAO} --context-parallel-size 2": "--context-parallel-size 2",
    f"{AIAO} --timing-log-level 2": "--timing-log-level 2",
    f"{AIAO} --tp-comm-overlap": "--tp-comm-overlap",
    f"{AIAO} --preemptive-comm --device cpu": "--preemptive-comm",
    f"{AIAO} --offload-activations auto": "--offload-activations auto",
    "--schedule aiao:step=next --segments 2 --overlap-grad-reduce --device cpu": (
        "step=next with measured shares"
    ),
    "--schedule aiao:wgrad=gaps --segments 2 --no-gradient-accumulation-fusion": "wgrad=gaps",
    f"{AIAO} --recompute-activations --distribute-saved-activations": (
        "--distribute-saved-activations"
    ),
    "--schedule interleaved --segments 2 --microbatch-group-size-per-virtual-pipeline-stage 3": (
        "groups of 3 micro-batches"
    ),
    "--schedule interleaved:group=2 --segments 2": "groups of 2 micro-batches",
    "--schedule zb-h1 --no-gradient-accumulation-fusion": "--schedule zb-h1",
}


@pytest.mark.parametrize(("line", "found"), REFUSED.items())
def test_what_pairs_cannot_run_with_is_refused_with_a_fix(refused, line: str, found: str):
    paired = re.sub(r"(--schedule \S+)", r"\1:pairs=on", line)
    refused(paired, f"(?m)^pairs=on with {found}: ", alone=False)


def test_a_run_without_a_pair_is_refused():
    paired = configured(choice=Choice.parse("aiao:pairs=on", 1))
    plans = Plans(paired)
    check_pairs(plans.training(plans.job(2)))
    with pytest.raises(PlanError, match=r"no pair in a plan of 1 micro-batches; .*raise"):
        check_pairs(plans.training(plans.job(1)))

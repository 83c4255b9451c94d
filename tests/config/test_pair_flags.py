"""What ``pairs=on`` accepts."""

import re
from argparse import ArgumentParser
from dataclasses import replace

import pytest

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.config.read_config import read_config
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.ir import PlanError
from megatron.fold3d.plan.passes.pairs import check_pairs
from megatron.fold3d.runtime.plans import Plans
from tests.configs import CONFIG

MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --pipeline-model-parallel-size 2 "
    "--attention-dropout 0 --hidden-dropout 0 --transformer-impl local "
    "--tensor-model-parallel-size 2"
)
AIAO = "--segments 2 --schedule aiao"
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall"
)


def config(parser: ArgumentParser, line: str) -> Fold3DConfig:
    return read_config(parser.parse_args(f"{MODEL} {line}".split()))


def test_pairs_are_off_unless_asked_for(parser: ArgumentParser):
    assert not config(parser, AIAO).choice.pairs
    assert config(parser, f"{AIAO} --schedule aiao:pairs=on").choice.pairs


def test_experts_of_transformer_engine_are_paired_without_tensor_parallelism(
    parser: ArgumentParser,
):
    line = (
        f"{AIAO}:pairs=on {EXPERTS} --tensor-model-parallel-size 1 --moe-grouped-gemm "
        "--transformer-impl transformer_engine"
    )
    assert config(parser, line).choice.pairs


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
    "--schedule interleaved --segments 2 --microbatch-group-size-per-virtual-pipeline-stage 4": (
        "--microbatch-group-size-per-virtual-pipeline-stage 4"
    ),
    "--schedule zb-h1 --no-gradient-accumulation-fusion": "--schedule zb-h1",
}


@pytest.mark.parametrize(("line", "found"), REFUSED.items())
def test_what_pairs_cannot_run_with_is_refused_with_a_fix(
    parser: ArgumentParser, line: str, found: str
):
    with pytest.raises(ValueError, match="pairs=on") as raised:
        config(parser, re.sub(r"(--schedule \S+)", r"\1:pairs=on", line))
    problems = str(raised.value).splitlines()
    (problem,) = (p for p in problems if p.startswith("pairs=on"))
    assert problem.startswith(f"pairs=on with {found}: ")
    assert "; " in problem


def test_a_run_without_a_pair_is_refused():
    paired = replace(CONFIG, choice=Choice.parse("aiao:pairs=on", 1))
    check_pairs(Plans(paired).training(2))
    with pytest.raises(PlanError, match=r"no pair in a plan of 1 micro-batches; .*raise"):
        check_pairs(Plans(paired).training(1))

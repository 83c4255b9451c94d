"""Flags are read back from Megatron's own configurations, which Megatron-Bridge extends."""

import re
from argparse import ArgumentParser, Namespace
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.training import argument_utils

from fold3d_patches.cpu.device import absent_gpu
from fold3d_patches.registry import apply
from megatron.fold3d.config.bridge_config import read_bridge
from megatron.fold3d.config.read_config import read_config
from megatron.fold3d.config.refusals import TABLE
from megatron.fold3d.config.settings import attribute_of
from tests.config.conftest import Parse
from tests.config.test_fold3d_config import validate

pytestmark = pytest.mark.skipif(
    not hasattr(argument_utils, "gpt_config_from_args"),
    reason="Megatron-Bridge 0.6 is for Megatron-core 0.19",
)

MORE = "--vocab-size 64 --lr 1e-2 --train-iters 4 --eval-interval 4"
SHARDED = "--overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather"


def container(args: Namespace) -> Any:
    """What a script of Bridge's would make for validated flags."""
    model = argument_utils.gpt_config_from_args(args)
    config = argument_utils.pretrain_cfg_container_from_args(args, model)
    config.data_parallel_size = args.data_parallel_size
    config.dataset = SimpleNamespace()  # of the script's own
    config.inprocess_restart = None
    return config


@pytest.mark.parametrize(
    ("ours", "megatrons"),
    [
        ("--schedule aiao --segments 2", ""),
        ("--schedule aiao --segments 2", f"{SHARDED} --bf16 --accumulate-allreduce-grads-in-fp32"),
        ("--schedule aiao:wgrad=last --segments 4", "--overlap-grad-reduce --clip-grad 0"),
        ("--schedule auto --segments 2", f"{SHARDED} --fp16"),
        ("--schedule auto --segments 2", "--untie-embeddings-and-output-weights"),
        ("--schedule interleaved:group=4 --segments 2", "--context-parallel-size 2"),
        ("--schedule 1f1b:ahead=1", "--tensor-model-parallel-size 2 --sequence-parallel"),
        ("--schedule aiao", "--pipeline-model-parallel-layout Ettt|t|tt|ttL"),
        ("--schedule 1f1b", "--decoder-first-pipeline-num-layers 2"),
        ("--schedule aiao --segments 2", "--num-experts 4 --swiglu --disable-bias-linear"),
        ("--schedule aiao:recompute=early --segments 2 --recompute-layers 1,1,2,2", ""),
    ],
)
def test_a_configuration_says_what_its_flags_said(parse, parser, ours, megatrons):
    with apply(absent_gpu(is_blackwell=True)):
        args = validate(parse(f"{ours} {megatrons}"), world_size=4)
    found = read_bridge(container(args), parser.parse_args(ours.split()))
    assert read_config(found) == read_config(args)


def test_a_flag_that_a_rule_reads_has_a_field(parse: Parse, parser: ArgumentParser) -> None:
    found = vars(read_bridge(container(validate(parse(""), world_size=4)), Namespace()))
    (ours,) = (group for group in parser._action_groups if group.title == "FOLD3D")
    known = {flag for action in ours._group_actions for flag in action.option_strings}
    read = set(re.findall(r"--[a-z0-9-]+", str(TABLE))) - known
    assert {flag for flag in read if attribute_of(flag) not in found} == {
        "--heterogeneous-layers-config-path",  # a field of another class of models
        *("--freeze-all-layers", "--perform-rl-step"),  # Megatron's own loop
        *(
            "--disable-bias-linear",
            "--no-gradient-accumulation-fusion",
        ),  # read as what they turn off
        "--no-overlap-p2p-communication",  # the default of Bridge
    }


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (None, None),
        ("Et|tL", "Et|tL"),
        ([["embedding", "decoder"], ["decoder", "mtp", "loss"]], "Et|tmL"),
    ],
)
def test_a_layout_is_read_in_all_its_forms(parse: Parse, layout: Any, text: str | None) -> None:
    config = container(validate(parse(""), world_size=4))
    config.model.transformer.pipeline_model_parallel_layout = layout
    assert read_bridge(config, Namespace()).pipeline_model_parallel_layout == text
    if layout is not None:
        config.model.transformer.pipeline_model_parallel_layout = PipelineParallelLayerLayout(
            layout, pipeline_model_parallel_size=2
        )
        assert read_bridge(config, Namespace()).pipeline_model_parallel_layout == text


def test_a_restart_within_the_process_is_refused(parse: Parse, parser: ArgumentParser) -> None:
    config = container(validate(parse("--schedule aiao"), world_size=4))
    config.inprocess_restart = SimpleNamespace(enabled=True)
    with pytest.raises(ValueError, match="--inprocess-restart with --schedule aiao"):
        read_config(read_bridge(config, parser.parse_args(["--schedule", "aiao"])))

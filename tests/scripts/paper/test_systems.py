from types import SimpleNamespace

import pytest

from megatron.fold3d.config.all_flags import megatron_defaults
from megatron.fold3d.config.read_config import read_config
from megatron.fold3d.predict.cost_model.presets import preset_flags
from scripts.paper.systems import SYSTEMS, Layout, main

LAYOUT = Layout(pipeline_ranks=4, segments=4, microbatches=16, sequences=2)
JOB = """--model-preset gpt3-39b --bf16 --tensor-model-parallel-size 8 --sequence-parallel
    --pipeline-model-parallel-size 4 --micro-batch-size 4 --global-batch-size 256 --lr 1e-4
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --mock-data --tokenizer-type NullTokenizer --vocab-size 50257 --train-iters 50"""
SCHEDULES = {  # and model chunks per rank
    "megatron": ("stock", 2),
    "megatron-best": ("stock", 4),
    "dspeed3d": ("stock", 1),
    "zero3": ("stock", 1),
    "auto": ("auto", 4),
}
PREEMPT = ("aiao+preempt", "fold3d")


@pytest.mark.parametrize("name", SYSTEMS)
def test_megatron_takes_a_systems_flags_for_the_papers_39b(name, parser, monkeypatch):
    from megatron.training.arguments import validate_args

    properties = SimpleNamespace(major=8)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _device: properties)
    queues = "8" if name == "zero3" else "32" if name in PREEMPT else "1"
    if name in PREEMPT:  # Megatron asserts one queue before Blackwell
        properties.major = 10
        monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (10, 0))
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    words = [*preset_flags("gpt3-39b", "gpt"), *JOB.split(), *SYSTEMS[name].words(LAYOUT)]
    args = parser.parse_args(words)
    args.rank, args.world_size = 0, 128
    validate_args(args, megatron_defaults(args))
    config = read_config(args)
    assert (config.choice.order, config.num_segments) == SCHEDULES.get(name, ("aiao", 4))
    overlaps = name not in ("megatron", "dspeed3d", "zero3")
    assert args.overlap_grad_reduce == overlaps
    assert args.data_parallel_size == (128 if name == "zero3" else 4)


def test_flags_of_ours_are_those_of_ours_alone():
    ours = {"--schedule", "--segments", "--offload-activations"}
    for name, system in SYSTEMS.items():
        is_ours = name.startswith(("aiao", "fold3d", "auto"))
        assert bool(ours & set(system.words(LAYOUT))) == is_ours


def test_a_system_that_cannot_run_says_why_in_a_line(capsys: pytest.CaptureFixture[str]):
    assert main(["zero3", "--", "--fp16"]) == 2
    assert capsys.readouterr().err == (
        "zero3 cannot run here: no fp16 in Megatron's FSDP2; use GPUs that have bf16\n"
    )
    assert main(["megatron", "--", "--pipeline-model-parallel-size", "1"]) == 2
    assert "in a pipeline only; give 2 ranks or more" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["deepspeed"])
    assert "deepspeed is no system; choose from megatron," in capsys.readouterr().err

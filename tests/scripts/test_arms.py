import shlex

import pytest

from megatron.fold3d.commands.compare import ARMS
from megatron.fold3d.commands.cost_sources import on_cluster
from megatron.fold3d.commands.job import config_of, run_of
from megatron.fold3d.commands.megatron_flags import described
from megatron.fold3d.commands.training_flags import training_flags
from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.predict.search.planner import strongest_stock
from scripts.slurm.arms import arms, main

MODEL = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 255"
JOB = f"{MODEL} --micro-batch-size 1 --global-batch-size 8 --train-iters 30 --lr 1e-3"
PIPELINE = "--pipeline-model-parallel-size 2"
SCRIPT = "pretrain_gpt.py"


@pytest.mark.search
def test_arms_are_yours_stock_in_the_same_layout_and_in_any_and_ours():
    own = f"{JOB} {PIPELINE} --overlap-grad-reduce --save x --load=x --trace y".split()
    found, notes = arms(own, SCRIPT, cluster("testbedx4"))
    assert "try these of stock's flags first, each alone:" in notes[0]
    assert list(found) == ["yours", "stock-same-layout", "stock-any-layout", "auto"]
    assert set(found) <= set(ARMS)
    traced = ["--trace-iterations", "29-30"]
    assert found["yours"] == [*f"{JOB} {PIPELINE} --overlap-grad-reduce".split(), *traced]
    layouts = {
        name: words[words.index("--pipeline-model-parallel-size") + 1]
        for name, words in found.items()
    }
    assert layouts == dict.fromkeys(found, "2") | {"stock-any-layout": "4"}
    strongest = found["stock-same-layout"]
    assert "--schedule" not in strongest
    assert found["auto"][found["auto"].index("--schedule") + 1] == "auto"
    chunks = strongest[strongest.index("--num-virtual-stages-per-pipeline-rank") + 1]
    assert found["auto"][found["auto"].index("--segments") + 1] == chunks
    for words in found.values():
        assert words[-2:] == traced
        assert words[words.index("--lr") + 1] == "1e-3"


@pytest.mark.search
def test_the_arm_of_stock_in_the_same_layout_is_the_one_that_check_names():
    gpus, own = cluster("a100x16-50g"), f"{JOB} {PIPELINE} --overlap-grad-reduce --bf16"
    found, _ = arms(own.split(), SCRIPT, gpus)
    tried = described([*own.split(), "--schedule", "auto", "--segments", "2"])
    config = config_of(tried, gpus)
    run = run_of(tried.args, config, on_cluster(tried.model(), gpus), tried.model(), gpus)
    named = strongest_stock(tried.model(), gpus, run.settled().candidate)  # as dry_run.report
    assert named is not None
    flags = training_flags(tried.model(), gpus, named.candidate, own=())
    assert {*shlex.split(flags)} <= set(found["stock-same-layout"])


@pytest.mark.search
def test_a_preset_is_a_model_for_the_search_too():
    own = f"--model-preset 8-64-4-32 {JOB.removeprefix(MODEL)} {PIPELINE} --vocab-size 255"
    found, _ = arms(own.split(), SCRIPT, cluster("testbedx4"))
    assert "--model-preset" in found["yours"]
    assert "--model-preset" not in found["auto"]
    assert found["auto"][:2] == ["--num-layers", "8"]


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (f"{JOB} --schedule aiao", {}, "--schedule: arms differ in it; give the flags of a job"),
        (MODEL, {}, "--train-iters None: auto chooses in the first of them; give 50"),
        (JOB, {"CLUSTER": ""}, "no CLUSTER: name the nodes as for `fold3d search`"),
        (JOB, {"SLURM_NTASKS": "8"}, "CLUSTER=testbedx4 has 4 GPUs, and the job 8 tasks"),
    ],
)
def test_what_has_no_arms_says_why(tmp_path, monkeypatch, capsys, flags, environment, message):
    for name, value in ({"CLUSTER": "testbedx4", "SLURM_NTASKS": "4"} | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main([str(tmp_path), SCRIPT, "--", *flags.split()])
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

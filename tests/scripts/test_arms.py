from pathlib import Path

import pytest

from megatron.fold3d.predict.cost_model.cluster import cluster
from scripts.slurm.arms import arms, main

MODEL = "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 255"
JOB = f"{MODEL} --micro-batch-size 1 --global-batch-size 8 --train-iters 30 --lr 1e-3"
PIPELINE = "--pipeline-model-parallel-size 2"
SCRIPT = "pretrain_gpt.py"


@pytest.mark.search
def test_arms_have_the_users_layout_the_searchs_and_ours():
    own = f"{JOB} {PIPELINE} --overlap-grad-reduce --save x --load=x --trace y".split()
    found, notes = arms(own, SCRIPT, cluster("testbedx4"))
    assert notes == []
    assert list(found) == ["given", "strongest", "search", "auto"]
    traced = ["--trace-iterations", "29-30"]
    assert found["given"] == [*f"{JOB} {PIPELINE} --overlap-grad-reduce".split(), *traced]
    layouts = {
        name: words[words.index("--pipeline-model-parallel-size") + 1]
        for name, words in found.items()
    }
    assert (layouts["given"], layouts["strongest"], layouts["auto"]) == ("2", "2", "2")
    assert "--schedule" not in found["strongest"]
    assert found["auto"][found["auto"].index("--schedule") + 1] == "auto"
    chunks = found["strongest"][
        found["strongest"].index("--num-virtual-stages-per-pipeline-rank") + 1
    ]
    assert found["auto"][found["auto"].index("--segments") + 1] == chunks
    for words in found.values():
        assert words[-2:] == traced
        assert words[words.index("--lr") + 1] == "1e-3"


@pytest.mark.search
def test_a_preset_is_a_model_for_the_search_too():
    own = f"--model-preset 8-64-4-32 {JOB.removeprefix(MODEL)} {PIPELINE} --vocab-size 255"
    found, _ = arms(own.split(), SCRIPT, cluster("testbedx4"))
    assert "--model-preset" in found["given"]
    assert "--model-preset" not in found["search"]
    assert found["search"][:2] == ["--num-layers", "8"]


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (f"{JOB} --schedule aiao", {}, "--schedule: arms differ in it; give the flags of a job"),
        (MODEL, {}, "--train-iters None: auto chooses in the first of them; give 50"),
        (JOB, {"CLUSTER": ""}, "no CLUSTER: name the nodes as for `fold3d search`"),
        (JOB, {"SLURM_NTASKS": "8"}, "CLUSTER=testbedx4 has 4 GPUs, and the job 8 tasks"),
    ],
)
def test_what_has_no_arms_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, flags, environment, message
):
    for name, value in ({"CLUSTER": "testbedx4", "SLURM_NTASKS": "4"} | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        main([str(tmp_path), SCRIPT, "--", *flags.split()])
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

"""``fold3d simulate -- FLAGS``: a training's own flags, without Megatron."""

import json

import pytest

MODEL = "--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --bf16"
SPLIT = "--pipeline-model-parallel-size 2 --segments 4 --micro-batch-size 2 --global-batch-size 64"
JOB = f"{MODEL} {SPLIT} --transformer-impl local --overlap-grad-reduce"
SIMULATE = "simulate --cluster a100x8-100g"


def test_flags_say_what_options_say(fold3d):
    by_flags = fold3d(f"{SIMULATE} --json -- {JOB} --schedule aiao:step=next --lr 1e-4")
    by_options = fold3d(
        f"{SIMULATE} --json --schedule aiao:step=next --pp 2 --segments 4 --microbatches 8 "
        "--model 16-1024-16-1024 --micro-batch-size 2"
    )
    found, other = (json.loads(out) for _, out, _ in (by_flags, by_options))
    assert found["period_s"] == other["period_s"]
    assert found["peak_bytes"] == other["peak_bytes"]
    assert found["left_out"] == []


def test_without_a_schedule_it_is_stocks_with_its_groups(fold3d):
    group = "--microbatch-group-size-per-virtual-pipeline-stage 8"
    chunks = JOB.replace("--segments", "--num-virtual-stages-per-pipeline-rank")
    _, out, _ = fold3d(f"{SIMULATE} -- {chunks} {group}")
    assert out.startswith("stock interleaved: 2 ranks, 4 segments, 8 micro-batches")
    _, serial, _ = fold3d(f"{SIMULATE} --json -- {JOB.replace('--overlap-grad-reduce', '')}")
    _, overlapped, _ = fold3d(f"{SIMULATE} --json -- {JOB}")
    assert json.loads(serial)["period_s"] > json.loads(overlapped)["period_s"]


def test_a_preset_stands_for_a_model(fold3d):
    line = f"simulate --cluster a100x64-200g -- --model-preset gpt3-18b --bf16 {SPLIT}"
    code, out, _ = fold3d(f"{line} --tensor-model-parallel-size 8 --recompute-granularity full")
    assert code == 0
    assert "stock interleaved" in out


def test_what_is_not_simulated_is_named(fold3d):
    more = "--lazy-inter-segment --optimizer sgd --use-distributed-optimizer"
    _, out, _ = fold3d(f"{SIMULATE} -- {JOB} --schedule aiao {more}")
    assert out.splitlines()[-1] == (
        "not in these estimates: --lazy-inter-segment, no --overlap-param-gather, --optimizer"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("simulate", "no --schedule, and no training flags behind --: give one of the two"),
        (f"{SIMULATE} --pp 2 -- {JOB}", "--pp beside training flags, which say it; drop it"),
        (f"simulate -- {JOB}", "training flags without --cluster"),
        (f"{SIMULATE} -- {SPLIT}", "the command line has no --num-layers, --hidden-size"),
        (f"{SIMULATE} -- {JOB} --schedule aia", "'aia' is no order"),
        (f"{SIMULATE} -- {JOB} --schedule aiao:wgrad=last@7", "there is no segment 7"),
        (f"{SIMULATE} -- {MODEL} --global-batch-size 9", "8 replicas: each computes equally many"),
        (
            f"{SIMULATE} -- {JOB} --tensor-model-parallel-size 3",
            "take 6 GPUs for a model, and the cluster has 8",
        ),
        (f"{SIMULATE} -- {JOB} --recompute-layers x", "--recompute-layers: 'x' is neither a list"),
        (f"{SIMULATE} -- {JOB} --mtp-num-layers 1", "does not model the layers of multi-token"),
    ],
)
def test_flags_that_cannot_be_simulated_are_refused_in_a_line(fold3d, line: str, message: str):
    code, out, err = fold3d(line)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1

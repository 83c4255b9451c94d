import json
from pathlib import Path

import pytest

from megatron.fold3d.observe.breakdown import Flops
from megatron.fold3d.observe.digits import seconds

pytestmark = pytest.mark.search

SEARCH = "search --global-batch-size 64"


@pytest.mark.parametrize("name", ["deep.json", "binary.toml", "nowhere.json"])
def test_a_model_file_that_cannot_be_read_is_named(fold3d, tmp_path: Path, name: str):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "binary.toml").write_bytes(b"\xff")
    err = fold3d.refusal(f"{SEARCH} --cluster a100x8 --model {tmp_path / name}")
    assert err.startswith(f"fold3d search: cannot read a model from {tmp_path / name}: ")


def test_search_says_what_is_best_and_how_to_run_it(fold3d):
    line = "search --model 12-1024-16-512 --cluster a100x8 --global-batch-size 16"
    code, out, _ = fold3d(f"{line} --top 3")
    assert code == 0
    assert len(out.splitlines()) >= 7  # a head, three rows, what was considered, verdict, flags
    _, emitted, _ = fold3d(f"{line} --emit")
    assert emitted in out
    _, as_json, _ = fold3d(f"{line} --top 3 --json")
    result = json.loads(as_json)
    assert len(result["rows"]) == 3
    assert result["flags"] == emitted.rstrip()
    times_s = [row["iteration_s"] for row in result["rows"]]
    assert times_s == sorted(times_s)
    assert result["best_stock"]["stock"]
    best = result["best"]
    rates = best["flops_per_gpu_s"], best["hardware_flops_per_gpu_s"]
    assert f"per GPU: {Flops(*rates)}" in out.splitlines()


def test_search_shows_many_hardware_queues_beside_the_one_of_tensor_parallelism(fold3d):
    line = "search --model 12-1024-16-512 --cluster a100x8 --global-batch-size 16 --top 1 --tp"
    _, out, _ = fold3d(f"{line} 2")
    result = json.loads(fold3d(f"{line} 2 --json")[1])
    least_s, most_s = result["many_queues_s"]
    assert least_s < most_s
    said = f"with CUDA_DEVICE_MAX_CONNECTIONS=32: {seconds(least_s)}, or up to {seconds(most_s)} as"
    assert said in out
    assert json.loads(fold3d(f"{line} 1 --json")[1])["many_queues_s"] is None


def test_search_says_that_aiao_gains_nothing_where_it_does_not(fold3d):
    _, out, _ = fold3d("search --model 24-2048-16 --cluster h100x8 --global-batch-size 64 --top 2")
    *_, verdict, flags = out.splitlines()
    assert verdict == "AIAO gains nothing here, use these stock flags:"
    assert "--schedule" not in flags


def test_what_no_gpu_has_timed_is_tried_on_request(fold3d):
    line = "search --model testbed --cluster testbedx4 --global-batch-size 16 --pp 2 --fp32"
    line += " --segments 2 --micro-batch-size 1"
    assumed = "preemptive-comm,offload,delay-weight-grads"
    tried = json.loads(fold3d(f"{line} --assume {assumed} --json")[1])
    usual = json.loads(fold3d(f"{line} --json")[1])
    assert tried["considered"] > usual["considered"]
    assert any(row["preemptive_comm"] for row in tried["rows"])
    assert not any(row["preemptive_comm"] or row["offload"] for row in usual["rows"])


def test_the_type_of_the_users_own_flags_is_kept(fold3d):
    line = (
        "search --cluster a100x4-25g --emit -- --num-layers 12 --hidden-size 1024 "
        "--num-attention-heads 16 --seq-length 512 --global-batch-size 16 {}"
    )
    for precision in (
        *("--fp16", "--fp16 --accumulate-allreduce-grads-in-fp32"),
        *("--bf16", "--bf16 --grad-reduce-in-bf16"),
    ):
        assert f" {precision} --tensor-model" in fold3d(line.format(precision))[1]


def test_what_the_search_does_not_choose_is_kept_of_the_users_own_flags(fold3d):
    own = (
        "--num-layers 12 --hidden-size 1024 --num-attention-heads 16 --seq-length 512 --bf16 "
        "--position-embedding-type rope --use-rope-scaling --norm-epsilon 1e-6 --hidden-dropout 0 "
        '--vocab-size 50000 --max-position-embeddings 4096 --data-path 0.3 "/data/a b"'
    )
    decided = (
        "--global-batch-size 16 --tensor-model-parallel-size=4 --recompute-granularity full "
        "--decoder-first-pipeline-num-layers 5 --sequence-parallel --schedule auto"
    )
    line = f"-- {own} {decided}"
    told = fold3d(f"search --cluster a100x4-25g --emit {line}")[1]
    assert told.startswith(own.replace(" --bf16", "").replace('"', "'") + " --bf16 --tensor-model")
    for flag in ("-size=4", "decoder-first", "--schedule auto", "--num-layers 12 --num-layers"):
        assert flag not in told
    said = fold3d(f"search --cluster a100x4-25g {line}")[1]
    assert said.splitlines()[-1] == told.strip()
    assert "instead of --decoder-first-pipeline-num-layers" in said


def test_gpus_without_bf16_are_told_to_train_in_fp16(fold3d):
    line = "search --model 12-1024-16-512 --global-batch-size 16 --emit --cluster"
    assert "--bf16" in fold3d(f"{line} a100x8")[1]
    fp16 = fold3d(f"{line} v100x8")[1]
    assert "--fp16 --accumulate-allreduce-grads-in-fp32" in fp16
    assert "--bf16" not in fp16
    sizes = "--tp 8 --pp 1 --segments 1 --grad-reduce-in-bf16"
    small = fold3d(f"{line} v100x16-25g {sizes}")[1]
    assert "--delta-param-gather" in small
    assert "--coded-grad-reduce" not in small  # no code is for gradients in fp16


def test_a_typed_size_of_the_model_is_among_the_flags_to_append_to_a_script(fold3d, tmp_path: Path):
    script = tmp_path / "train.sh"
    script.write_text(
        "torchrun pretrain_gpt.py --num-layers 12 --hidden-size 1024 --num-attention-heads 16 "
        "--seq-length $LENGTH --global-batch-size 8 --bf16\n"
    )
    line = f"search --cluster a100x4-25g --tp 1 --pp 2 --from-script {script}"
    code, told, _ = fold3d(f"{line} --seq-length 512 --global-batch-size 16 --emit")
    assert code == 0
    assert told.startswith("--seq-length 512 --bf16 --tensor-model-parallel-size 1 ")
    assert "--global-batch-size 16 " in told

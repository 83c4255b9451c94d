"""``--check`` tells on one process without a GPU what a job of many ranks would begin with."""

import contextlib
import importlib
import io
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_distributed

pytestmark = pytest.mark.gloo

ROOT = Path(__file__).parents[2]
OF_A_JOB = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FLAGS = (
    "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --bf16 "
    "--max-position-embeddings 1024 --tokenizer-type NullTokenizer --vocab-size 50257 "
    "--micro-batch-size 1 --global-batch-size 64 --lr 1e-4 --train-iters 10 --eval-iters 0 "
    "--eval-interval 100 --transformer-impl local --pipeline-model-parallel-size 2 --mock-data "
    "--schedule aiao --overlap-grad-reduce"
)
SPLITS = "--no-gradient-accumulation-fusion"
MANY_QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def test_the_plan_the_memory_and_the_time_are_told_without_a_gpu() -> None:
    argv = "--segments 2 --schedule aiao:step=next --check a100-80gx16-100g"
    out = _passed(f"{FLAGS} {argv}".split())
    lines = out.splitlines()  # and nothing of Megatron's
    assert lines[:2] == [
        "can begin: 16 ranks, dp=8 pp=2",
        "plan: aiao, 2 ranks, 2 segments, 8 micro-batches, verified",
    ]
    assert re.fullmatch(r"memory: (\d+\.\d) (\d+\.\d) GiB per pipeline rank, estimated", lines[2])
    predicted = (
        r"iteration: [\d.]+ s on a100-80gx16-100g, predicted: bubble \d+%, DP.sync \d+%, .* of it"
    )
    assert re.fullmatch(predicted, lines[3])
    assert lines[4:] == [
        "next: CLUSTER=a100-80gx16-100g sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 "
        "scripts/slurm/compare.sbatch, and the job's flags without --check and --schedule"
    ]


def test_what_an_estimate_leaves_out_is_told() -> None:
    argv = f"{FLAGS} --segments 2 --use-distributed-optimizer --check a100-80gx16-100g"
    argv += " --fp32-residual-connection"
    one_queue = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    out = _passed(argv.split(), one_queue)
    assert out.splitlines()[-1] == (
        "not in these estimates: --fp32-residual-connection, one hardware queue"
    )


def test_what_auto_would_try_is_told_without_a_gpu() -> None:
    argv = f"{FLAGS} --schedule auto --segments 4 {SPLITS} --check a100-80gx16-100g"
    out = _passed(argv.split())
    lines = out.splitlines()
    assert lines[1].startswith("plan: auto begins in stock's order, 2 ranks, 4 segments, 8 micro")
    at = lines.index("--schedule auto measures, and is then predicted to try:")
    assert lines[at + 1].startswith("  stock, same layout  stock ")
    assert lines[at + 2].startswith("  stock's order       interleaved  ")
    assert re.fullmatch(r"  tries +\S+:wgrad=gaps\S* .* s +\d+\.\d% (fast|slow)er", lines[at + 3])


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--segments 5 --check", "5 segments with 12 layers per rank"),
        (  # Megatron's own rule for GPUs before Blackwell, which it asks a GPU about
            "--segments 2 --tensor-model-parallel-size 2 --check",
            "CUDA_DEVICE_MAX_CONNECTIONS to 1",
        ),
        ("--segments 2 --seq-length 65536 --check a100x16", "rank 0 would hold .*`fold3d search`"),
    ],
)
def test_what_cannot_begin_is_refused_with_exit_code_2(flags: str, reason: str) -> None:
    argv = FLAGS.replace("--max-position-embeddings 1024", "--max-position-embeddings 65536")
    err = _refused(f"{argv} {flags}".split())
    assert re.search(f"pretrain_gpt.py: error: .*{reason}", err, re.DOTALL), err
    assert "Traceback" not in err


SPLIT = f"{FLAGS} --segments 2 --tensor-model-parallel-size 2 --sequence-parallel"


def test_tensor_parallelism_takes_many_queues_and_preemption() -> None:
    for flags in ("--preemptive-comm", "--schedule aiao:step=next:share=0.5:slices=on"):
        argv = f"{SPLIT} {flags} --check a100x16-100g".split()
        out = _passed(argv, MANY_QUEUES)
        assert out.startswith("can begin: 16 ranks, dp=4 pp=2 tp=2\n")


def test_before_blackwell_many_queues_and_user_buffers_exclude_each_other() -> None:
    argv = f"{SPLIT} --tp-comm-overlap --check"
    err = _refused(argv.split(), MANY_QUEUES)
    found = "--tp-comm-overlap with CUDA_DEVICE_MAX_CONNECTIONS=32: "
    assert err.startswith(f"pretrain_gpt.py: error: {found}")
    assert err.endswith("drop --tp-comm-overlap, or give CUDA_DEVICE_MAX_CONNECTIONS=1\n")
    _passed(f"{argv} b200x16".split(), MANY_QUEUES)


def test_a_login_node_without_gpu_software_hears_of_the_run_alone(tmp_path: Path) -> None:
    flags = FLAGS.replace("--transformer-impl local ", "")
    flags += " --position-embedding-type rope --segments 2 --check a100x16-100g"
    environment = {name: value for name, value in os.environ.items() if name not in OF_A_JOB}
    timed = [sys.executable, "-X", "importtime", ROOT / "pretrain_gpt.py", *flags.split()]
    done = subprocess.run(
        timed, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert said == []
    assert " torch._inductor\n" not in done.stderr  # as long to import as the rest of Megatron
    *_, last = done.stdout.splitlines()
    if find_spec("transformer_engine") is None:
        assert last.startswith("not on this machine: --transformer-impl transformer_engine: ")
    else:
        assert last.startswith("iteration: ")


def test_stages_without_layers_and_uneven_ones_are_predicted() -> None:
    few = FLAGS.replace("--num-layers 24 ", "--num-layers 6 ").replace("--schedule aiao", "")
    few = few.replace("size 2 --mock", "size 4 --mock")
    for layout in ("E|t*3|t*3|L", "E|t*3|t*3L|"):  # Megatron computes the loss last in both
        argv = f"{few} --pipeline-model-parallel-layout {layout} --check a100x4-25g"
        out = _passed(argv.split())
        assert (said := re.search(r"iteration: (\d+\.\d+) s", out)), out
        assert float(said[1]) > 0.1
    uneven = FLAGS.replace("--num-layers 24 ", "--num-layers 7 ")
    argv = (
        f"{uneven} --pipeline-model-parallel-layout Ett|tt|tt|tL --schedule auto {SPLITS} "
        "--use-distributed-optimizer --overlap-param-gather --check a100-80gx16-100g"
    )
    out = _passed(argv.split())
    assert "--schedule auto measures" in out


def test_a_script_of_ones_own_ends_where_it_would_begin(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "import megatron.fold3d as fold3d\n"
        "fold3d.parse_args(args_defaults={'tokenizer_type': 'NullTokenizer'})\n"
        "raise SystemExit('it went on')\n"
    )
    argv = f"{FLAGS} --segments 2 --check".replace("--tokenizer-type NullTokenizer", "")
    out = _passed(argv.split(), script=str(script))
    assert out.startswith("can begin: 2 ranks, dp=1 pp=2\nplan: aiao, 2 ranks, 2 segments, 64 ")
    assert out.splitlines()[-1].startswith("no prediction of time; --check CLUSTER")


def _passed(*arguments: Any, script: str | None = None) -> str:
    """Return what a check of ``pretrain_gpt.py``, or of a script, prints; it passes."""
    ((code, out, err),) = run_distributed(_run, 1, script, *arguments)
    assert code == 0, err
    return str(out)


def _refused(*arguments: Any) -> str:
    """Return why a check of ``pretrain_gpt.py`` refuses a job."""
    ((code, out, err),) = run_distributed(_run, 1, None, *arguments)
    assert (code, out) == (2, "")
    return str(err)


def _run(
    script: str | None,
    argv: Sequence[str],
    environment: Mapping[str, str] = {},
    program: str = "pretrain_gpt",
) -> tuple[int, str, str]:
    """Run a script, or a program of ours, as on a login node; returns its exit code and outputs."""
    os.environ.update(environment)

    for name in OF_A_JOB:
        os.environ.pop(name, None)
    sys.argv = [script or "pretrain_gpt.py", *argv]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if script is None:
            code = importlib.import_module(program).main(argv)
        else:
            with pytest.raises(SystemExit) as left:
                runpy.run_path(script, run_name="__main__")
            code = left.value.code
    return code, out.getvalue(), err.getvalue()

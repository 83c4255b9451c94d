"""The pages' commands for GPUs, as far as they run without: a small model, late device."""

import re
import shlex
from pathlib import Path

import pytest

from megatron.fold3d.cli import main
from tests.distributed import run_distributed
from tests.end_to_end.test_check import _run as checked
from tests.end_to_end.training import differences, train
from tests.gpu_path.cases import UNCHECKED
from tests.gpu_path.late_training import Late, train_late
from tests.gpu_path.test_gpu_script import replaced
from tests.programs import ROOT

pytestmark = pytest.mark.gloo
PAGE = ROOT / "docs/quickstart.md"
SMALLER = {
    "24-2048-16-1024": "8-32-4-16",
    "--global-batch-size 16": "--global-batch-size 4",
    "--train-iters 20": "--train-iters 5",
}


def commands() -> list[str]:
    """Return the arguments of pretrain_gpt.py on a node with two GPUs: stock's, then ours."""
    section = PAGE.read_text().split("On a node with two GPUs")[1]
    block = section.split("```sh\n")[1].split("```")[0].replace("\\\n", " ")
    found = re.findall(r"torchrun --nproc-per-node 2 pretrain_gpt.py (.*) > out/\w+.log", block)
    assert ["--schedule stock" in words for words in found] == [True, False]
    assert "fold3d compare out/stock out/aiao" in block
    return found


def test_the_commands_for_gpus_train_alike_on_the_late_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = []
    for words in commands():
        smaller = replaced(words, {**SMALLER, "out/": f"{tmp_path}/"})
        argv.append(shlex.split(f"{smaller} --device cpu --num-workers 0 {UNCHECKED}"))
    stock, ours = argv
    late = run_distributed(train_late, 2, ours, Late(), timeout_s=150)
    assert not differences(late, run_distributed(train, 2, stock, timeout_s=150))
    assert main(["compare", str(tmp_path / "stock"), str(tmp_path / "aiao")]) == 0
    assert "aiao" in capsys.readouterr().out


def test_the_command_for_gpus_passes_the_check_of_a_job() -> None:
    _, ours = commands()
    # Transformer Engine, which the page installs first, cannot be imported without a GPU.
    words = f"{ours} --check --transformer-impl local --no-persist-layer-norm"
    ((code, out, err),) = run_distributed(checked, 1, None, shlex.split(words))
    assert code == 0, err
    assert out.startswith("can begin: 2 ranks, dp=1 pp=2\nplan: aiao, 2 ranks, 4 segments")

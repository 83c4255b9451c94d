"""What `scripts/gpu.sh` trains, run without a GPU: a small model, late device."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.training import as_known, differences, once, train
from tests.gpu_path.cases import UNCHECKED
from tests.gpu_path.late_training import Late, train_late
from tests.programs import ROOT, printed

SMALLER = {
    "--num-layers 8": "--num-layers 4",
    "--hidden-size 1024 --num-attention-heads 16": "--hidden-size 32 --num-attention-heads 4",
    "--seq-length 1024 --max-position-embeddings 1024": "--seq-length 16 "
    "--max-position-embeddings 16",
    "--global-batch-size 16": "--global-batch-size 8",
    "--vocab-size 50257": "--vocab-size 63",
    "--train-iters 20": "--train-iters {iterations}",
}


@dataclass(frozen=True, slots=True)
class Run:
    """A run of the script: its flags, and those of the run whose losses it must have."""

    name: str
    ranks: int
    queues: int
    flags: str
    stock: str

    def __str__(self) -> str:
        return self.name


def runs() -> list[Run]:
    """Return all runs of ours that the script starts with Megatron's own layers."""
    found: list[Run] = []
    stock = ""
    script = (ROOT / "scripts/gpu.sh", "--dry-run", "OUT", "python")
    for line in printed(*script, GPUS="8", IMPLEMENTATIONS="local").splitlines():
        command, _, flags = line.partition(" pretrain_gpt.py ")
        if not flags:
            continue
        _, name, _, queues, *_, ranks = command.split()
        if "--schedule stock" in flags:
            stock = flags
            continue
        number = int(queues.partition("=")[2])
        found.append(Run(name.rstrip(":"), int(ranks), number, flags, stock))
    return found


RUNS = runs()


# In every run of the tests some of them: others differ in what `CASES` have too, `auto` among it.
SAMPLE = [
    run if number % 10 == 2 else pytest.param(run, marks=pytest.mark.stress)
    for number, run in enumerate(RUNS)
]


@pytest.mark.gloo
@pytest.mark.parametrize("run", SAMPLE, ids=str)
def test_a_run_of_the_gpu_script_trains_what_its_stock_run_trains(run: Run, tmp_path: Path) -> None:
    iterations = 11 if "--schedule auto" in run.flags else 3  # auto tries two orders until then
    late = Late(num_queues=run.queues)
    ours = run_distributed(train_late, run.ranks, _small(run.flags, iterations, tmp_path), late)
    stock = once(train, run.ranks, _small(run.stock, iterations, None))
    assert differences(ours, as_known(ours, stock)) == []


def replaced(text: str, others: Mapping[str, str]) -> str:
    """Put others in the place of some words of a command, which it has."""
    for old, new in others.items():
        assert old in text
        text = text.replace(old, new)
    return text


def _small(flags: str, iterations: int, folder: Path | None) -> tuple[str, ...]:
    words = shlex.split(replaced(flags, SMALLER).format(iterations=iterations))
    at = words.index("--trace") if "--trace" in words else len(words)
    trace = () if folder is None or at == len(words) else ("--trace", str(folder))
    more = shlex.split(f"--device cpu --num-workers 0 {UNCHECKED}")
    return (*words[:at], *words[at + 2 :], *trace, *more)

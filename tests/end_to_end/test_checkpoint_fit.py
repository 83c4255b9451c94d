"""A checkpoint that a run cannot go on from is refused in a line, before anything is built."""

import shutil
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.test_bad_runs import _refused
from tests.end_to_end.test_equal_to_stock import Row
from tests.end_to_end.training import train

pytestmark = pytest.mark.gloo

ROW = Row(m=2, flags="--num-layers 4 --hidden-size 16 --eval-iters 0")
SAVE = "--schedule aiao --save-interval 2 --save"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_distributed(train, 2, ROW.command(f"{SAVE} {folder}"))
    return folder


@pytest.fixture(scope="module")
def in_older_format(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("older")
    run_distributed(train, 2, ROW.command(f"{SAVE} {folder} --ckpt-format torch"))
    return folder


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            "--hidden-size 32",
            "iter_0000004 there has hidden_size 16, this run has 32; change --hidden-size, or load",
        ),
        ("--optimizer sgd --ckpt-format torch --auto-detect-ckpt-format", "--no-load-optim"),
        ("--ckpt-format torch", "is in the format torch_dist; give --ckpt-format torch_dist"),
    ],
)
def test_one_that_does_not_fit_is_refused(flags: str, reason: str, saved: Path) -> None:
    _refused(ROW.command(f"--schedule aiao --load {saved} {flags}"), reason)


def test_one_of_another_layout_is_refused_in_the_older_format(in_older_format: Path) -> None:
    argv = ROW.command(f"--schedule aiao --load {in_older_format} --ckpt-format torch")
    argv = tuple("1" if at and argv[at - 1] == "--segments" else w for at, w in enumerate(argv))
    _refused(argv, "has virtual_pipeline_model_parallel_size 2, this run has None")


@pytest.mark.parametrize(("format_", "file"), [("torch_dist", "*"), ("torch", "*/*.pt")])
def test_one_that_cannot_be_read_is_refused(
    format_: str, file: str, saved: Path, in_older_format: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(saved if format_ == "torch_dist" else in_older_format, folder)
    for path in (folder / "iter_0000004").glob(file):
        path.write_bytes(path.read_bytes()[:100])
    argv = ROW.command(f"--schedule aiao --load {folder} --ckpt-format {format_}")
    _refused(argv, r"iter_0000004 there cannot be read, .*; give --ckpt-step 2")

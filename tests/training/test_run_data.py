"""Parts of the data that are wanted have a token; losses are looked at as the flags say."""

import logging
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core import rerun_state_machine
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from fold3d_patches import cpu
from fold3d_patches.registry import apply
from megatron.fold3d.config.spelling import flag_of
from megatron.fold3d.training import pretraining


def write_documents(prefix: Path, lengths: Sequence[int]) -> str:
    """Write documents of so many tokens as Megatron reads them; returns the path to give it."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    for length in lengths:
        builder.add_document(torch.ones(length, dtype=torch.int32), [length])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def found(
    data: Sequence[str | None], weights: list[float] | None = None, **given: object
) -> list[str]:
    """What is found in data that are to be split, or in three parts that they are in already."""
    options = {"split": None, "eval_iters": 1, "full_validation": False, "skip_train": False}
    args = Namespace(**options | given)
    whole = (list(data), weights) if args.split else None
    parts = None if args.split else [part and ([part], None) for part in data]
    return [*pretraining._parts(args, whole, parts, by_documents=False)]


@pytest.mark.parametrize("option", ["full_validation", "iterations_to_skip"])
def test_options_that_read_data_on_each_rank_need_data_there(option: str) -> None:
    def told(ranks: int) -> list[str]:
        args = {"full_validation": False, "iterations_to_skip": [], option: [3]}
        return [*pretraining._unread(Namespace(**args, pipeline_model_parallel_size=ranks))]

    assert told(1) == told(2) == []
    (problem,) = told(4)
    assert problem.startswith(f"{flag_of(option)} with --pipeline-model-parallel-size 4: Megatron")


def test_each_part_is_a_document_at_least(tmp_path: Path) -> None:
    few = write_documents(tmp_path / "few", [4] * 10)
    assert found([few], split="8,1,1") == []
    assert found([few], split="9,1,0") == []
    why = f"no token of {few} is for test: Megatron would look for one for ever; give more"
    for eval_iters in (0, 1):  # it looks for one more token than no sample has
        (problem,) = found([few], split="969,300,1", eval_iters=eval_iters)
        assert problem.startswith(f"--split 969,300,1: {why}")


def test_documents_without_a_token_are_none(tmp_path: Path) -> None:
    hollow = write_documents(tmp_path / "hollow", [4] * 8 + [0, 0])
    (problem,) = found([hollow], split="8,2")
    assert "is for validation" in problem
    empty = write_documents(tmp_path / "empty", [])
    (problem,) = found([empty, None, None], eval_iters=0)
    assert problem.startswith(f"no token of {empty} is for training")


def test_a_blend_with_weights_takes_samples_of_each(tmp_path: Path) -> None:
    many = write_documents(tmp_path / "many", [4] * 100)
    one = write_documents(tmp_path / "one", [4])
    (problem,) = found([many, one], [0.9, 0.1], split="9,1")
    assert f"no token of {one} is for validation" in problem
    assert found([many, one], split="9,1") == []  # as much of each as there is


def test_evaluation_has_data(tmp_path: Path) -> None:
    data = write_documents(tmp_path / "data", [4] * 10)
    (problem,) = found([data], split="1,0,0")
    assert problem == (
        "--split 1,0,0: nothing is for validation, and --eval-iters is 1; "
        "give it some, or --eval-iters 0"
    )
    assert found([data], split="1,0,0", eval_iters=0) == []
    (problem,) = found([data, None, None])
    assert problem.startswith("without data for validation, and --eval-iters is 1")
    (problem,) = found([data], split="0,1,0")
    assert problem.startswith("--split 0,1,0: nothing is for training")
    assert found([data], split="0,1,0", skip_train=True) == []


@pytest.mark.parametrize(("asked", "warnings"), [(True, 1), (False, 0)])
def test_a_spike_in_the_loss_is_seen_if_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, asked: bool, warnings: int
) -> None:
    flags = SimpleNamespace(check_for_nan_in_loss_and_grad=False, check_for_spiky_loss=asked)
    monkeypatch.setattr(pretraining, "get_args", lambda: flags)
    mode = rerun_state_machine.RerunMode.DISABLED  # it then says what it sees, and goes on
    machine = rerun_state_machine.RerunStateMachine(mode=mode)
    monkeypatch.setattr(pretraining, "get_rerun_state_machine", lambda: machine)
    with (
        apply(cpu.patches()),
        caplog.at_level(logging.WARNING, logger=rerun_state_machine.__name__),
    ):
        for loss in (*[1.0] * 100, 9.0, 100.0):  # it learns from 100 what is usual
            pretraining.check_loss(torch.tensor(loss))
    assert sum("spike in the loss" in record.message for record in caplog.records) == warnings

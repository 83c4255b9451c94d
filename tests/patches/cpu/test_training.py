"""Stock Megatron trains under the patches: what only more than one rank can show."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fold3d_patches.cpu import data_loader
from fold3d_patches.registry import Patch
from tests.distributed import run_distributed
from tests.end_to_end.training import TINY, Record, train

pytestmark = pytest.mark.gloo

MODEL = (
    f"{TINY} --attention-dropout 0.1 --hidden-dropout 0.1 --schedule stock --num-layers 2 "
    "--global-batch-size 4 --lr 1e-2 --lr-decay-iters 10 --eval-iters 0 --eval-interval 100"
)
DROPOUT = "--tensor-model-parallel-size 2 --train-iters 2 --hidden-dropout 0.3"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def trained(flags: str) -> Record:
    return train(shlex.split(f"{MODEL} {flags}"))


def trained_with_megatrons_data_loader(flags: str) -> Record:
    [ours] = data_loader.PATCHES
    data_loader.PATCHES = (Patch(target=ours.target, make=lambda upstream: upstream),)
    return trained(flags)


def replicas(ranks: Sequence[Record]) -> list[dict[str, str]]:
    """Of each tensor-parallel rank the parameters that the others have too."""
    whole = ("layernorm", "position_embeddings", "linear_proj.bias", "linear_fc2.bias")
    return [
        {name: digest for name, digest in rank.parameters.items() if any(w in name for w in whole)}
        for rank in ranks
    ]


@pytest.mark.parametrize("flags", [DROPOUT, f"{DROPOUT} {FULL}"], ids=["plain", "recompute"])
def test_tensor_parallel_replicas_drop_the_same_units(flags: str) -> None:
    first, second = replicas(run_distributed(trained, 2, flags))
    assert first == second
    assert len(first) == 15


def test_replicas_drift_apart_if_the_data_loader_draws_from_the_generator_of_dropout() -> None:
    ranks = run_distributed(trained_with_megatrons_data_loader, 2, DROPOUT)
    first, second = replicas(ranks)
    assert first != second, "Megatron's data loader has become harmless: remove the patch"


NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"
ROPE = "--position-embedding-type rope --group-query-attention --num-query-groups 2"
EXPERTS = "--num-experts 4 --moe-token-dispatcher-type alltoall --disable-bias-linear"


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        ("--tensor-model-parallel-size 2", "--sequence-parallel"),
        (f"{ROPE} --micro-batch-size 2", "--context-parallel-size 2"),
    ],
    ids=["sequence", "context"],
)
def test_ranks_that_share_sequences_train_what_whole_sequences_train(flags: str, more: str) -> None:
    plain, shared = (
        run_distributed(trained, 2, f"{NO_DROPOUT} --train-iters 2 {flags} {line}")[0].iterations
        for line in ("", more)
    )
    assert numbers(shared) == near(plain)


def test_ranks_that_share_experts_train_what_whole_layers_train(tmp_path: Path) -> None:
    flags = f"{NO_DROPOUT} {EXPERTS}"  # from one checkpoint: each initializes experts in its way
    run_distributed(trained, 2, f"{flags} --train-iters 1 --save {tmp_path} --save-interval 1")
    whole, shared = (
        run_distributed(trained, 2, f"{flags} --load {tmp_path} --finetune --train-iters 2 {more}")
        for more in ("", "--expert-model-parallel-size 2")
    )
    assert numbers(shared[0].iterations) == near(whole[0].iterations)


def numbers(iterations: Sequence[dict[str, str]]) -> list[dict[str, float]]:
    return [{name: float.fromhex(text) for name, text in row.items()} for row in iterations]


def near(iterations: Sequence[dict[str, str]]) -> list[Any]:
    """Not bit for bit: sums are made of one part per rank."""
    return [pytest.approx(row, rel=1e-5) for row in numbers(iterations)]

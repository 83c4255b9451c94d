"""What ``--replicate-optimizer`` accepts."""

from argparse import ArgumentParser
from pathlib import Path

import pytest

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.config.replication_flags import REFUSALS

MODEL = (
    "--num-layers 12 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --pipeline-model-parallel-size 2"
)
REDUCE = "--use-distributed-optimizer --overlap-grad-reduce"
AIAO = f"--schedule aiao --segments 3 {REDUCE} --overlap-param-gather"
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def config(parser: ArgumentParser, line: str) -> Fold3DConfig:
    return Fold3DConfig.from_args(parser.parse_args(f"{MODEL} {line}".split()))


def test_segments_of_all_ranks_are_replicated(parser: ArgumentParser):
    assert config(parser, AIAO).replicated_stages == ()
    found = config(parser, f"{AIAO} --replicate-optimizer 0,2")
    assert found.replicated_stages == (0, 1, 4, 5)
    assert found.ties_embeddings
    assert not found.auto_replicates
    auto = config(parser, f"{AIAO} --replicate-optimizer auto")
    assert (auto.auto_replicates, auto.replicated_segments) == (True, ())


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (REDUCE, "--replicate-optimizer 1 with --schedule stock"),
        (f"--schedule aiao --segments 3 {REDUCE}", "--replicate-optimizer 1 without --overlap-par"),
        (
            "--schedule aiao --segments 3 --overlap-grad-reduce",
            "--replicate-optimizer 1 without --use-distributed-optimizer and --overlap-param-gat",
        ),
        (f"{AIAO} --segments 1", "--replicate-optimizer 1: there is no segment 1, a rank holds 1"),
        (f"{AIAO} --segments auto", "--replicate-optimizer 1 with --segments auto"),
        (f"{AIAO} --backward-share 1", "--backward-share 1.0 with --replicate-optimizer 1"),
        (f"{AIAO} --shard-segments weights", "--shard-segments weights with --replicate-optimizer"),
        (f"{AIAO} --preemptive-comm", "--preemptive-comm with --replicate-optimizer 1"),
        (f"{AIAO} --dp-slices on", "--dp-slices on with --replicate-optimizer 1"),
        (f"{AIAO} --replicate-optimizer 0,1", "--replicate-optimizer 0,1 with tied embeddings"),
        (
            f"{AIAO} --replicate-optimizer auto --delay-weight-grads auto --transformer-impl local "
            "--no-gradient-accumulation-fusion",
            "--replicate-optimizer auto with --delay-weight-grads auto",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_its_fix(parser: ArgumentParser, line: str, found: str):
    with pytest.raises(ValueError, match=f"^{found}") as raised:
        config(parser, f"--replicate-optimizer 1 {line}")
    (problem,) = str(raised.value).splitlines()
    assert "; " in problem


def test_one_replica_is_refused_once_their_number_is_known(parser: ArgumentParser):
    args = parser.parse_args(f"{MODEL} {AIAO} --replicate-optimizer 1".split())
    args.data_parallel_size = 1
    with pytest.raises(ValueError, match="with one replica"):
        Fold3DConfig.from_args(args)


def test_the_page_names_every_refused_option():
    page = PAGE.read_text().split("## With `--replicate-optimizer`")[1].split("## ")[0]
    for row in REFUSALS:
        assert f"`{row.flag}`" in page

"""What ``optimizer=`` accepts."""

from argparse import ArgumentParser

import pytest

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.config.read_config import read_config

MODEL = (
    "--num-layers 12 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --pipeline-model-parallel-size 2"
)
REDUCE = "--use-distributed-optimizer --overlap-grad-reduce"
AIAO = f"--schedule aiao --segments 3 {REDUCE} --overlap-param-gather"
WHOLE = "optimizer=replicated@1"
ONE = f"{AIAO} --schedule aiao:{WHOLE}"


def config(parser: ArgumentParser, line: str) -> Fold3DConfig:
    return read_config(parser.parse_args(f"{MODEL} {line}".split()))


def test_segments_of_all_ranks_are_replicated(parser: ArgumentParser):
    assert config(parser, AIAO).choice.where(optimizer="replicated") == ()
    found = config(parser, f"{AIAO} --schedule aiao:optimizer=replicated@0,2")
    assert found.choice.stages(2, optimizer="replicated") == (0, 1, 4, 5)
    assert found.ties_embeddings
    assert not found.auto
    auto = config(parser, f"{AIAO} --schedule aiao:optimizer=auto")
    assert (auto.auto, auto.choice.where(optimizer="replicated")) == ({"optimizer"}, ())


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (f"--schedule stock:{WHOLE} {REDUCE}", f"{WHOLE} with --schedule stock"),
        (f"--schedule aiao:{WHOLE} --segments 3 {REDUCE}", f"{WHOLE} without --overlap-par"),
        (
            f"--schedule aiao:{WHOLE} --segments 3 --overlap-grad-reduce",
            f"{WHOLE} without --use-distributed-optimizer and --overlap-param-gat",
        ),
        (f"{ONE} --segments 1", f"{WHOLE}: there is no segment 1, a rank holds 1"),
        (f"{ONE} --segments auto", f"{WHOLE} with --segments auto"),
        (f"{ONE} --schedule aiao:{WHOLE}:step=next", f"step=next with {WHOLE}"),
        (f"{ONE} --shard-segments weights", f"--shard-segments weights with {WHOLE}"),
        (f"{ONE} --preemptive-comm", f"--preemptive-comm with {WHOLE}"),
        (f"{ONE} --schedule aiao:{WHOLE}:slices=on", f"slices=on with {WHOLE}"),
        (
            f"{AIAO} --schedule aiao:optimizer=replicated@0,1",
            "optimizer=replicated@0,1 with tied embeddings",
        ),
        (
            f"{AIAO} --schedule aiao:optimizer=auto:wgrad=gaps --transformer-impl local "
            "--no-gradient-accumulation-fusion",
            "optimizer=auto with wgrad=gaps",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_its_fix(parser: ArgumentParser, line: str, found: str):
    with pytest.raises(ValueError, match=f"^{found}") as raised:
        config(parser, line)
    (problem,) = str(raised.value).splitlines()
    assert "; " in problem


def test_one_replica_is_refused_once_their_number_is_known(parser: ArgumentParser):
    args = parser.parse_args(f"{MODEL} {ONE}".split())
    args.data_parallel_size = 1
    with pytest.raises(ValueError, match="with one replica"):
        read_config(args)


def test_shards_without_a_distributed_optimizer_are_refused(parser: ArgumentParser):
    for order in ("aiao", "auto"):
        line = f"--schedule {order}:optimizer=sharded --segments 3 --overlap-grad-reduce"
        with pytest.raises(ValueError, match=r"^optimizer=sharded without --use"):
            config(parser, line)

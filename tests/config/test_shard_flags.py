"""What ``--shard-segments`` accepts."""

from argparse import ArgumentParser

import pytest

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.config.read_config import read_config

MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --pipeline-model-parallel-size 2"
)
REDUCE = "--use-distributed-optimizer --overlap-grad-reduce"
AIAO = f"--schedule aiao --segments 2 {REDUCE} --overlap-param-gather"


def config(parser: ArgumentParser, line: str) -> Fold3DConfig:
    return read_config(parser.parse_args(f"{MODEL} {line}".split()))


def test_it_is_off_unless_asked_for(parser: ArgumentParser):
    assert not config(parser, AIAO).features.shards_params
    assert config(parser, f"{AIAO} --shard-segments weights").features.shards_params


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (REDUCE, "--shard-segments weights with --schedule stock"),
        (f"--schedule 1f1b {REDUCE}", "--shard-segments weights without --overlap-param-gather"),
        (
            "--schedule 1f1b --overlap-grad-reduce",
            "--shard-segments weights without --use-distributed-optimizer and --overlap-param-gat",
        ),
        (
            f"{AIAO} --fp8-format hybrid --fp8-recipe tensorwise",
            "--fp8-format hybrid with --shard-segments weights",
        ),
        (
            f"{AIAO} --num-distributed-optimizer-instances 2",
            "--num-distributed-optimizer-instances 2 with --shard-segments weights",
        ),
        (f"{AIAO} --log-params-norm", "--log-params-norm with --shard-segments weights"),
        (
            f"{AIAO} --check-weight-hash-across-dp-replicas-interval 5",
            "--check-weight-hash-across-dp-replicas-interval 5 with --shard-segments weights",
        ),
        (f"{AIAO} --use-nccl-ub", "--use-nccl-ub with --shard-segments weights"),
    ],
)
def test_what_cannot_work_is_refused_with_its_fix(parser: ArgumentParser, line: str, found: str):
    with pytest.raises(ValueError, match=f"^{found}") as raised:
        config(parser, f"--shard-segments weights {line}")
    (problem,) = str(raised.value).splitlines()
    assert "; " in problem


def test_gradients_are_sharded_with_parameters(parser: ArgumentParser):
    assert not config(parser, f"{AIAO} --shard-segments weights").features.shards_grads
    both = config(parser, f"{AIAO} --shard-segments gradients")
    assert both.features.shards_params
    assert both.features.shards_grads


def test_whole_gradients_cannot_be_saved_from_shards(parser: ArgumentParser):
    saving = f"{AIAO} --save /tmp/x --save-wgrads-interval 2"
    assert config(parser, f"{saving} --shard-segments weights").features.shards_params
    with pytest.raises(ValueError, match=r"^--save-wgrads-interval 2 with --shard-segments grad"):
        config(parser, f"{saving} --shard-segments gradients")


def test_gradients_that_are_freed_are_not_reduced_in_slices_later(parser: ArgumentParser):
    assert config(
        parser, f"{AIAO} --schedule aiao:slices=on --shard-segments weights"
    ).choice.slices
    with pytest.raises(ValueError, match=r"^slices=on with --shard-segments gradients"):
        config(parser, f"{AIAO} --schedule aiao:slices=on --shard-segments gradients")


def test_one_replica_is_refused_once_their_number_is_known(parser: ArgumentParser):
    args = parser.parse_args(f"{MODEL} {AIAO} --shard-segments weights".split())
    args.data_parallel_size = 1
    with pytest.raises(ValueError, match="with one replica"):
        read_config(args)

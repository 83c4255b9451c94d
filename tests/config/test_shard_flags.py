"""What ``--shard-segments`` accepts."""

import pytest

from megatron.fold3d.config.read_config import read_config

REDUCE = "--use-distributed-optimizer --overlap-grad-reduce"
AIAO = f"--schedule aiao --segments 2 {REDUCE} --overlap-param-gather"


def test_it_is_off_unless_asked_for(config):
    assert config(AIAO).job.shards == "off"
    assert config(f"{AIAO} --shard-segments weights").job.shards != "off"


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
def test_what_cannot_work_is_refused_with_its_fix(refused, line: str, found: str):
    refused(f"--shard-segments weights {line}", f"^{found}")


def test_gradients_are_sharded_with_parameters(config):
    assert config(f"{AIAO} --shard-segments weights").job.shards != "gradients"
    both = config(f"{AIAO} --shard-segments gradients")
    assert both.job.shards == "gradients"


def test_whole_gradients_cannot_be_saved_from_shards(config):
    saving = f"{AIAO} --save /tmp/x --save-wgrads-interval 2"
    assert config(f"{saving} --shard-segments weights").job.shards != "off"
    with pytest.raises(ValueError, match=r"^--save-wgrads-interval 2 with --shard-segments grad"):
        config(f"{saving} --shard-segments gradients")


def test_gradients_that_are_freed_are_not_reduced_in_slices_later(config):
    assert config(f"{AIAO} --schedule aiao:slices=on --shard-segments weights").choice.slices
    with pytest.raises(ValueError, match=r"^slices=on with --shard-segments gradients"):
        config(f"{AIAO} --schedule aiao:slices=on --shard-segments gradients")


def test_one_replica_is_refused_once_their_number_is_known(parse):
    args = parse(f"{AIAO} --shard-segments weights")
    args.data_parallel_size = 1
    with pytest.raises(ValueError, match="with one replica"):
        read_config(args)

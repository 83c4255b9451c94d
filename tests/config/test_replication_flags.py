"""What ``optimizer=`` accepts."""

import pytest

from megatron.fold3d.config.read_config import read_config

MORE = "--num-layers 12"
REDUCE = "--use-distributed-optimizer --overlap-grad-reduce"
AIAO = f"--schedule aiao --segments 3 {REDUCE} --overlap-param-gather"
WHOLE = "optimizer=replicated@1"
ONE = f"{AIAO} --schedule aiao:{WHOLE}"
SHARDED = "optimizer=sharded --segments 3 --overlap-grad-reduce"


def test_segments_of_all_ranks_are_replicated(config):
    assert config(AIAO).choice.where(optimizer="replicated") == ()
    found = config(f"{AIAO} --schedule aiao:optimizer=replicated@0,2")
    assert found.choice.stages(2, optimizer="replicated") == (0, 1, 4, 5)
    assert found.ties_embeddings
    assert not found.auto
    auto = config(f"{AIAO} --schedule aiao:optimizer=auto")
    assert (auto.auto, auto.choice.where(optimizer="replicated")) == ({"optimizer"}, ())


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (f"{ONE} --segments 1", f"{WHOLE}: there is no segment 1, a rank holds 1"),
        (f"{ONE} --segments auto", f"{WHOLE} with --segments auto"),
        (f"{ONE},0", "optimizer=replicated@0,1 with tied embeddings"),
        (
            f"{ONE},0 --mtp-num-layers 1 --untie-embeddings-and-output-weights",
            "optimizer=replicated@0,1 with --mtp-num-layers 1: the first and the last segment",
        ),
        # Shards without a distributed optimizer
        (f"--schedule aiao:{SHARDED}", "optimizer=sharded without --use"),
        (f"--schedule auto:{SHARDED}", "optimizer=sharded without --use"),
    ],
)
def test_what_cannot_work_is_refused_with_its_fix(refused, line: str, found: str):
    refused(line, f"^{found}", alone=SHARDED not in line)


def test_one_replica_is_refused_once_their_number_is_known(parse):
    args = parse(ONE)
    args.data_parallel_size = 1
    with pytest.raises(ValueError, match="with one replica"):
        read_config(args)
    args.context_parallel_size = 2  # these ranks hold the same layers
    assert read_config(args).num_replicas == 2

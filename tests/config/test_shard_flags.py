"""What ``--shard-segments`` accepts."""

REDUCE = "--use-distributed-optimizer --overlap-grad-reduce"
AIAO = f"--schedule aiao --segments 2 {REDUCE} --overlap-param-gather"


def test_weights_are_sharded_and_gradients_with_them_if_asked_for(config):
    assert config(AIAO).job.shards == "off"
    for shards in ("weights", "gradients"):
        assert config(f"{AIAO} --shard-segments {shards}").job.shards == shards

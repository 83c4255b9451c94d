"""What ``--shard-segments`` accepts."""

REDUCE = "--use-distributed-optimizer --overlap-grad-reduce"
AIAO = f"--schedule aiao --segments 2 {REDUCE} --overlap-param-gather"


def test_it_is_off_unless_asked_for(config):
    assert config(AIAO).job.shards == "off"
    assert config(f"{AIAO} --shard-segments weights").job.shards != "off"


def test_gradients_are_sharded_with_parameters(config):
    assert config(f"{AIAO} --shard-segments weights").job.shards != "gradients"
    both = config(f"{AIAO} --shard-segments gradients")
    assert both.job.shards == "gradients"

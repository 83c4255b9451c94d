"""What cannot work with --preemptive-comm is refused before anything starts."""

from argparse import ArgumentParser

import pytest

from megatron.fold3d.config.read_config import read_config

NEEDED = "--pipeline-model-parallel-size 2 --num-layers 8 --preemptive-comm"


def refused(parser: ArgumentParser, flags: str) -> str:
    with pytest.raises(ValueError, match="--preemptive-comm") as caught:
        read_config(parser.parse_args(f"{NEEDED} {flags}".split()))
    return str(caught.value)


def test_stock_has_no_plan_whose_transfers_could_be_scheduled(parser: ArgumentParser):
    assert "give --schedule aiao, or drop it" in refused(parser, "")


@pytest.mark.parametrize(
    "flags",
    ["--num-distributed-optimizer-instances 2", "--ddp-reduce-scatter-with-fp32-accumulation"],
)
def test_collectives_that_preemption_cannot_slice_are_refused(flags: str, parser: ArgumentParser):
    message = refused(parser, f"--schedule aiao --use-distributed-optimizer {flags}")
    assert message.startswith(f"{flags} with --preemptive-comm")
    assert message.count("\n") == 0


def test_dp_slice_bytes_needs_no_backward_share_with_preemption(parser: ArgumentParser):
    flags = f"{NEEDED} --schedule aiao:slice-bytes=65536".split()
    config = read_config(parser.parse_args(flags))
    assert (config.preemptive_comm, config.slice_bytes) == (True, 65536)
    assert config.choice.slice_bytes is not None  # what is given is taken as it is

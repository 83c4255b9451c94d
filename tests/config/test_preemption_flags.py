"""What cannot work with --preemptive-comm is refused before anything starts."""

import pytest

MORE = "--preemptive-comm"


def test_stock_has_no_plan_whose_transfers_could_be_scheduled(refused):
    refused("", "--preemptive-comm.*give --schedule aiao, or drop it", alone=False)


@pytest.mark.parametrize(
    "flags",
    ["--num-distributed-optimizer-instances 2", "--ddp-reduce-scatter-with-fp32-accumulation"],
)
def test_collectives_that_preemption_cannot_slice_are_refused(refused, flags: str):
    refused(f"--schedule aiao --use-distributed-optimizer {flags}", f"^{flags} with --preemptive")


def test_dp_slice_bytes_needs_no_backward_share_with_preemption(config):
    found = config("--schedule aiao:slice-bytes=65536")
    assert (found.preemptive_comm, found.slice_bytes) == (True, 65536)
    assert found.choice.slice_bytes is not None  # what is given is taken as it is

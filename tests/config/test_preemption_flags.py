"""What ``--preemptive-comm`` accepts."""

MORE = "--preemptive-comm"


def test_dp_slice_bytes_needs_no_backward_share_with_preemption(config):
    found = config("--schedule aiao:slice-bytes=65536")
    assert (found.preemptive_comm, found.slice_bytes) == (True, 65536)
    assert found.choice.slice_bytes is not None  # what is given is taken as it is

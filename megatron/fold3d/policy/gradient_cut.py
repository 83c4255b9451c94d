"""Whether every model chunk's gradients are cut into buckets, in training and for the planner."""


def cuts_every_segment(*, one_queue: bool, distributed_optimizer: bool) -> bool:
    """Tell whether a run cuts the gradients of every segment, on every rank, into buckets.

    Args:
        one_queue: whether all streams of a GPU share one hardware queue. A segment's buckets are
            launched in a row, and in one queue all but the last block later computation until they
            have ended: see `megatron.fold3d.plan.device_queues`.
        distributed_optimizer: whether the optimizer is distributed. It keeps stock's buckets, since
            they decide its shards.
    """
    return not one_queue and not distributed_optimizer

"""Where the time of one rank went, from its own measurements alone.

One rank cannot distinguish waits for messages in flight from waits for messages that have not been
sent yet; a trace of all ranks can.
"""

from megatron.fold3d.observe.exposure import computed
from megatron.fold3d.observe.timeline import Lane
from megatron.fold3d.observe.trace_files import IterationTrace
from megatron.fold3d.observe.trace_timeline import spans_of


def rank_exposure(row: IterationTrace) -> dict[str, float]:
    """Return where a rank's iteration went.

    ``copies_s`` overlaps the rest; all other values add up to ``total_s``.
    """
    seconds = dict.fromkeys(
        ("forward_s", "backward_s", "optimizer_s", "exposed_grad_sync_s", "copies_s"), 0.0
    )
    for span in spans_of(row):
        if span.lane is Lane.COMPUTE:
            seconds[computed(span)] += span.duration_s
        elif span.lane is Lane.OPTIMIZER:
            seconds["optimizer_s"] += span.duration_s
        elif span.lane is Lane.WAIT:
            seconds["exposed_grad_sync_s"] += span.duration_s
        elif span.lane is Lane.COPY:
            seconds["copies_s"] += span.duration_s
    used_s = sum(seconds.values()) - seconds["copies_s"]
    seconds["bubble_and_exposed_p2p_s"] = max(0.0, row.end_s - used_s)
    seconds["total_s"] = row.end_s
    return seconds

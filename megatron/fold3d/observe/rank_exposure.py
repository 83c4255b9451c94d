"""Where the time of one rank went, from its own measurements alone.

One rank cannot distinguish waits for messages in flight from waits for messages that have not been
sent yet; a trace of all ranks can.
"""

from megatron.fold3d.observe.exposure import column
from megatron.fold3d.observe.timeline import BUSY_LANES, Lane
from megatron.fold3d.observe.trace_files import IterationTrace
from megatron.fold3d.observe.trace_timeline import spans_of


def rank_exposure(row: IterationTrace) -> dict[str, float]:
    """Return where a rank's iteration went.

    ``copies_s`` overlaps the rest; all other values add up to ``total_s``.
    """
    names = {"grad_sync_s": "exposed_grad_sync_s", "copy_s": "copies_s"}
    seconds = dict.fromkeys(("forward_s", "backward_s", "optimizer_s", *names.values()), 0.0)
    for span in spans_of(row):
        if span.lane in BUSY_LANES or span.lane is Lane.COPY:
            seconds[names.get(column(span), column(span))] += span.duration_s
    used_s = sum(seconds.values()) - seconds["copies_s"]
    seconds["bubble_and_exposed_p2p_s"] = max(0.0, row.end_s - used_s)
    seconds["total_s"] = row.end_s
    return seconds

"""``step=next`` and ``share=``: optimizer steps that reach into the next iteration.

That is exact as long as nothing needs all gradients before the first step, and nothing reads
parameters or gradients between iterations.
"""

from argparse import Namespace
from collections.abc import Iterator

from megatron.fold3d.plan.schedule_word import AUTO

_SMALLEST_SLICE = 4096  # below, a message costs more than what it carries


def first_share(args: Namespace) -> float | None:
    """Return the share that a run begins with; ``auto`` may replace it once times are measured."""
    if args.backward_share != AUTO:
        share: float | None = args.backward_share
        return share
    if not measures_shares(args):
        return 1.0

    from megatron.fold3d.policy.backward_shares import FIRST_SHARE

    return FIRST_SHARE


def measures_shares(args: Namespace) -> bool:
    """Tell whether shares follow from measured times.

    With the distributed optimizer ``auto`` is 1 and nothing is measured: all-gathers already fill
    the next forward, and deferred reduce-scatters would prolong it. Shares are measured only if
    weight gradients are delayed, since their reduce-scatters then end after the first segment's.
    """
    is_sharded = args.use_distributed_optimizer and not args.delay_weight_grads
    return args.backward_share == AUTO and not is_sharded


def share_problems(args: Namespace) -> Iterator[str]:
    """Yield one message (found, rule, fix) per share, or size of slices, that there cannot be."""
    share, slice_bytes = args.backward_share, args.dp_slice_bytes
    if slice_bytes is not None and slice_bytes < _SMALLEST_SLICE:
        yield (
            f"slice-bytes={slice_bytes}: a slice this small costs more to send than it "
            f"carries; give at least {_SMALLEST_SLICE}"
        )
    if slice_bytes is not None and share is None and not args.preemptive_comm:
        yield (
            f"slice-bytes={slice_bytes} without step=next: DP.sync is Megatron's, in buckets; add "
            "step=next, or give --ddp-bucket-size"
        )
    if share not in (None, AUTO) and not 0 <= share <= 1:
        yield f"share={share}: it is a share of DP.sync; give a number from 0 to 1"

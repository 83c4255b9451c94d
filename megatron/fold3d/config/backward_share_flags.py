"""``--backward-share``: the flag, and the options that it excludes.

With it, optimizer steps reach into the next iteration. That is exact as long as nothing needs all
gradients before the first step, and nothing reads parameters or gradients between iterations.
"""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator

from megatron.fold3d.config.argument_group import ArgumentGroup
from megatron.fold3d.config.refusals import refused

_SMALLEST_SLICE = 4096  # below, a message costs more than what it carries


AUTO = "auto"


def add_share_flags(group: ArgumentGroup) -> None:
    """Add ``--backward-share``."""
    group.add_argument(
        "--backward-share",
        type=share_or_auto,
        metavar="X",
        help="Let DP.sync reach into the next iteration: the share X, from 0 to 1, of a segment's "
        "gradients is reduced behind its backward, the rest behind the next forward. auto measures "
        "an iteration and computes how much fits; with the distributed optimizer it is 1, unless "
        "weight gradients are delayed. While steps are clipped or skipped, as by default, an "
        "iteration ends when all gradients are reduced.",
    )


def share_or_auto(text: str) -> float | str:
    """Read the value of ``--backward-share``."""
    try:
        return text if text == AUTO else float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is neither a number nor {AUTO}") from None


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


def share_problems(args: Namespace, schedule: str) -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting ``--backward-share`` cannot run with."""
    share, slice_bytes = args.backward_share, args.dp_slice_bytes
    if slice_bytes is not None and slice_bytes < _SMALLEST_SLICE:
        yield (
            f"--dp-slice-bytes {slice_bytes}: a slice this small costs more to send than it "
            f"carries; give at least {_SMALLEST_SLICE}"
        )
    if slice_bytes is not None and share is None and not args.preemptive_comm:
        yield (
            f"--dp-slice-bytes {slice_bytes} without --backward-share: DP.sync is Megatron's, in "
            "buckets; add --backward-share, or give --ddp-bucket-size"
        )
    if share is None:
        return
    if share != AUTO and not 0 <= share <= 1:
        yield f"--backward-share {share}: it is a share of DP.sync; give a number from 0 to 1"
    if schedule == "stock":
        yield (
            f"--backward-share {share} with --schedule stock: only a plan defers DP.sync; "
            "drop it, or give --schedule aiao"
        )
        return

    from megatron.fold3d.config.backward_share_refusals import REFUSALS

    yield from refused(REFUSALS, args, schedule, f"--backward-share {share}")
    if not args.overlap_grad_reduce:
        yield (
            f"--backward-share {share} without --overlap-grad-reduce: Megatron then reduces all "
            "gradients at the end of the iteration; add --overlap-grad-reduce"
        )

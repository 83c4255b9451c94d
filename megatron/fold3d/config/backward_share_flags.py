"""``--backward-share``: the flag, and what it cannot be combined with.

With it, optimizer steps reach into the next iteration. That is exact as long as nothing needs all
gradients before the first step, and nothing reads parameters or gradients between iterations.
"""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator

from megatron.fold3d.config.argument_group import ArgumentGroup
from megatron.fold3d.config.refusals import Refusal, spelled

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
        "what fits behind it. Not given, an iteration ends when all gradients are reduced.",
    )


def share_or_auto(text: str) -> float | str:
    """Read the value of ``--backward-share``."""
    try:
        return text if text == AUTO else float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is neither a number nor {AUTO}") from None


def first_share(args: Namespace) -> float | None:
    """Return the share that a run begins with; ``auto`` replaces it once times are measured."""
    if args.backward_share != AUTO:
        share: float | None = args.backward_share
        return share

    from megatron.fold3d.policy.backward_shares import FIRST_SHARE

    return FIRST_SHARE


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
    for row in REFUSALS:
        if row.applies(args, schedule):
            found = spelled(row.flag, getattr(args, row.attribute))
            yield f"{found} with --backward-share {share}: {row.rule}; {row.fix}"
    if not args.overlap_grad_reduce:
        yield (
            f"--backward-share {share} without --overlap-grad-reduce: Megatron then reduces all "
            "gradients at the end of the iteration; add --overlap-grad-reduce"
        )


_AFTER = "it changes gradients that are reduced, and some are reduced in the next iteration"
_READS = "it reads parameters between iterations, when some of their steps are still due"
_GRADS = "it reads gradients between iterations, when some are still on their way"
_STEP = "segments are stepped one by one, and it steps in another way"
_DROP = "drop it, or drop --backward-share"

REFUSALS = (
    Refusal(
        "--use-distributed-optimizer",
        "use_distributed_optimizer",
        "it reduces and gathers shards, and only whole gradients are deferred",
        _DROP,
    ),
    Refusal(
        "--optimizer",
        "optimizer",
        _STEP,
        "use --optimizer adam or sgd",
        found=lambda args: args.optimizer not in ("adam", "sgd"),
    ),
    Refusal("--optimizer-cpu-offload", "optimizer_cpu_offload", _STEP, _DROP),
    Refusal("--mtp-num-layers", "mtp_num_layers", _AFTER, _DROP),
    Refusal(
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        "ddp_param_name_patterns_for_fp32_local_accumulation",
        "gradients are copied back when they are reduced",
        _DROP,
    ),
    Refusal("--log-num-zeros-in-grad", "log_num_zeros_in_grad", _GRADS, _DROP),
    Refusal("--save-wgrads-interval", "save_wgrads_interval", _GRADS, _DROP),
    Refusal("--save-params-interval", "save_params_interval", _READS, _DROP),
    Refusal("--log-params-norm", "log_params_norm", _READS, _DROP),
    Refusal("--qk-clip", "qk_clip", _READS, _DROP),
    Refusal(
        "--check-weight-hash-across-dp-replicas-interval",
        "check_weight_hash_across_dp_replicas_interval",
        _READS,
        _DROP,
    ),
    Refusal(
        "--timing-log-level",
        "timing_log_level",
        "its barriers would stand in steps that ranks take at different times",
        "give --timing-log-level 0",
    ),
)

"""What cannot work with ``--backward-share``, and the stages that it is for.

With it, optimizer steps reach into the next iteration. That is exact as long as nothing needs all
gradients before the first step, and nobody reads parameters or gradients between iterations.
"""

from argparse import Namespace
from collections.abc import Iterator

from megatron.fold3d.refusals import Refusal, spelled


def share_problems(args: Namespace, schedule: str, num_segments: int) -> Iterator[str]:
    """Yield found, rule and fix of all that is in the way of ``--backward-share``."""
    share = args.backward_share
    if share is None:
        return
    if not 0 <= share <= 1:
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
    if not deferred_stages(args, num_segments):
        yield (
            f"--backward-share {share} with {args.pipeline_model_parallel_size} stages: the first "
            "and the last share the word embeddings and are synced at the end of the iteration, "
            "and there is no other; give more --segments, or "
            "--untie-embeddings-and-output-weights"
        )


def deferred_stages(args: Namespace, num_segments: int) -> range:
    """Return the stages whose DP.sync may reach into the next iteration.

    Word embeddings that the first and the last stage share are summed over both when each has
    been reduced over its replicas: neither stage can be stepped before.
    """
    num_ranks: int = args.pipeline_model_parallel_size
    num_stages = num_ranks * num_segments
    if args.backward_share is None:
        return range(0)
    if num_ranks > 1 and not args.untie_embeddings_and_output_weights:
        return range(1, num_stages - 1)
    return range(num_stages)


def _sums_over_tensor_parallel(args: Namespace) -> bool:
    return bool(args.tensor_model_parallel_size > 1)


_SCALER = "a step may be skipped when all gradients are known, and some steps are taken before"
_AFTER = "it changes gradients that are reduced, and some are reduced in the next iteration"
_READS = "it reads parameters between iterations, when some of their steps are still due"
_GRADS = "it reads gradients between iterations, when some are still on their way"
_STEP = "segments are stepped one by one, and it steps in another way"
_DROP = "drop it, or drop --backward-share"

REFUSALS = (
    Refusal(
        "--clip-grad",
        "clip_grad",
        "the norm needs all gradients before the first step",
        "give --clip-grad 0",
    ),
    Refusal("--fp16", "fp16", _SCALER, "use --bf16"),
    Refusal("--loss-scale", "loss_scale", _SCALER, _DROP),
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
    Refusal("--calculate-per-token-loss", "calculate_per_token_loss", _AFTER, _DROP),
    Refusal(
        "--sequence-parallel",
        "sequence_parallel",
        _AFTER,
        _DROP,
        found=lambda args: args.sequence_parallel and _sums_over_tensor_parallel(args),
    ),
    Refusal(
        "--qk-layernorm",
        "qk_layernorm",
        _AFTER,
        _DROP,
        found=lambda args: args.qk_layernorm and _sums_over_tensor_parallel(args),
    ),
    Refusal(
        "--experimental-attention-variant",
        "experimental_attention_variant",
        _AFTER,
        _DROP,
        found=lambda args: (
            bool(args.experimental_attention_variant) and _sums_over_tensor_parallel(args)
        ),
    ),
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

"""Options of Megatron that ``step=next`` cannot be combined with; see `share_problems`."""

from megatron.fold3d.config.optimizer_refusals import STEP_REFUSALS
from megatron.fold3d.config.refusals import Refusal

_AFTER = "it changes gradients that are reduced, and some are reduced in the next iteration"
_READS = "it reads parameters between iterations, when some of their steps are still due"
_GRADS = "it reads gradients between iterations, when some are not reduced yet"
_DROP = "drop it, or drop step=next"

REFUSALS = (
    Refusal(
        "--optimizer",
        "optimizer",
        "segments are stepped one by one, which this optimizer does not support",
        "use --optimizer adam or sgd",
        found=lambda args: args.optimizer not in ("adam", "sgd"),
    ),
    *STEP_REFUSALS,
    Refusal("--mtp-num-layers", "mtp_num_layers", _AFTER, _DROP),
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
        "its barriers are inside optimizer steps, which ranks take at different times",
        "give --timing-log-level 0",
    ),
)

"""Options of Megatron that change how the optimizer steps or how parameters are gathered.

``step=next`` and ``optimizer=replicated`` step segment by segment. Both refuse these
options, and each has further rows of its own.
"""

from megatron.fold3d.config.refusals import Refusal

_STEP = "it changes the optimizer step, and segments are stepped one by one"
_DROP = "drop one of the two"

STEP_REFUSALS = (
    Refusal(
        "--num-distributed-optimizer-instances",
        "num_distributed_optimizer_instances",
        "a segment is reduced and gathered in one group of ranks, and an instance has its own",
        _DROP,
        found=lambda args: args.num_distributed_optimizer_instances > 1,
    ),
    Refusal(
        "--overlap-param-gather-with-optimizer-step",
        "overlap_param_gather_with_optimizer_step",
        _STEP,
        _DROP,
    ),
    Refusal("--use-precision-aware-optimizer", "use_precision_aware_optimizer", _STEP, _DROP),
    Refusal("--optimizer-cpu-offload", "optimizer_cpu_offload", _STEP, _DROP),
    Refusal("--fp8-param-gather", "fp8_param_gather", _STEP, _DROP),
    Refusal("--fp4-param-gather", "fp4_param_gather", _STEP, _DROP),
)

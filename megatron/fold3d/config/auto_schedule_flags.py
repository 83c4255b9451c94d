"""``--schedule auto``: what it may choose in a run, and what it cannot be combined with."""

from argparse import Namespace
from collections.abc import Iterator

from megatron.fold3d.config.backward_share_flags import share_problems
from megatron.fold3d.config.bucket_flags import has_one_queue
from megatron.fold3d.config.refusals import spelled
from megatron.fold3d.config.replication_flags import replication_problems
from megatron.fold3d.config.weight_grad_flags import weight_grad_problems

NAME = "auto"
_CHOOSES = "it chooses that itself"
_COMPARES = "it compares iterations, and that changes while it does"
_UNSHOWN = "never shown to train what stock does"

_UNFIT = {
    "delay_weight_grads": _CHOOSES,
    "early_dp_sync": _CHOOSES,
    "backward_share": _CHOOSES,
    "replicate_optimizer": _CHOOSES,
    "recompute_early": _UNSHOWN,
    "overlap_tensor_parallel": _UNSHOWN,
    "preemptive_comm": _UNSHOWN,
    "lazy_inter_segment": _UNSHOWN,
}
_UNFIT_VALUES = (
    ("recompute_layers", "auto", _COMPARES),
    ("offload_activations", "auto", _COMPARES),
    ("offload_activations", "on", _UNSHOWN),
    ("shard_segments", "weights", _UNSHOWN),
    ("shard_segments", "gradients", _UNSHOWN),
    ("dp_slices", "on", _UNSHOWN),
)
_NOTHING: tuple[object, ...] = (None, (), False)
_DRAWS = ("attention_dropout", "hidden_dropout", "moe_input_jitter_eps", "fp8", "fp4")


def auto_schedule_problems(args: Namespace, schedule: str) -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting ``--schedule auto`` cannot run with."""
    if schedule != NAME:
        return
    given = [(name, rule) for name, rule in _UNFIT.items() if getattr(args, name) not in _NOTHING]
    given += [(name, rule) for name, value, rule in _UNFIT_VALUES if getattr(args, name) == value]
    for name, rule in given:
        value, flag = getattr(args, name), "--" + name.replace("_", "-")
        if isinstance(value, tuple):
            value = ",".join(map(str, value))
        yield (f"{spelled(flag, value)} with --schedule auto: {rule}; drop it, or name a schedule")


def may_defer(args: Namespace, schedule: str) -> bool:
    """Tell whether DP.sync may reach into the next iteration.

    With the distributed optimizer this gains nothing. With one hardware queue it would need slices,
    which the plan would have to place.
    """
    return (
        schedule == NAME
        and args.overlap_grad_reduce
        and not args.use_distributed_optimizer
        and not has_one_queue(args)
        and not any(share_problems(_with(args, backward_share=NAME), schedule))
    )


def may_delay(args: Namespace, schedule: str, num_segments: int) -> bool:
    """Tell whether weight gradients may be apart from their backwards."""
    as_if = _with(args, delay_weight_grads=NAME, segments=num_segments)
    return schedule == NAME and not any(weight_grad_problems(as_if, schedule, num_segments))


def may_replicate(args: Namespace, schedule: str, num_segments: int) -> bool:
    """Tell whether every replica may step some segments in full."""
    as_if = _with(args, replicate_optimizer=NAME, segments=num_segments)
    return schedule == NAME and not any(replication_problems(as_if, schedule, num_segments))


def keeps_forwards(args: Namespace) -> bool:
    """Tell whether results depend on the order of a rank's forwards, as with dropout's masks."""
    return any(getattr(args, name, None) for name in _DRAWS)


def keeps_sums(args: Namespace) -> bool:
    """Tell whether results may not even differ by the rounding of sums."""
    return bool(getattr(args, "deterministic_mode", False))


def _with(args: Namespace, **values: object) -> Namespace:
    return Namespace(**{**vars(args), **values})

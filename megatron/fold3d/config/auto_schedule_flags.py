"""``--schedule auto``: what it may choose in a run, and what it cannot be combined with."""

from argparse import Namespace
from collections.abc import Iterator

from megatron.fold3d.config.backward_share_flags import share_problems
from megatron.fold3d.config.bucket_flags import has_one_queue
from megatron.fold3d.config.refusals import spelled
from megatron.fold3d.config.replication_flags import replication_problems
from megatron.fold3d.config.weight_grad_flags import weight_grad_problems
from megatron.fold3d.plan.schedule_word import VALUES

NAME = "auto"
_CHOOSES = "it chooses that itself"
_COMPARES = "it compares iterations, and that changes while it does"
_UNSHOWN = "never shown to train what stock does"

# What the word may not say beside `auto`, unless it is the value that all have by default.
_CHOSEN = {
    "optimizer": ("replicate_optimizer", _CHOOSES),
    "step": ("backward_share", _CHOOSES),
    "wgrad": ("delay_weight_grads", _CHOOSES),
    "recompute": ("recompute_early", _UNSHOWN),
    "pairs": ("overlap_tensor_parallel", _UNSHOWN),
}
_UNFIT = {"preemptive_comm": _UNSHOWN, "lazy_inter_segment": _UNSHOWN}
_UNFIT_VALUES = (
    ("recompute_layers", "auto", _COMPARES),
    ("offload_activations", "auto", _COMPARES),
    ("offload_activations", "on", _UNSHOWN),
    ("shard_segments", "weights", _UNSHOWN),
    ("shard_segments", "gradients", _UNSHOWN),
)
_DRAWS = ("attention_dropout", "hidden_dropout", "moe_input_jitter_eps", "fp8", "fp4")


def auto_schedule_problems(args: Namespace, schedule: str) -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting ``--schedule auto`` cannot run with."""
    if schedule != NAME:
        return
    for key, (name, rule) in _CHOSEN.items():
        if getattr(args, name):
            default = f"{key}={VALUES[key][0]}"
            yield (
                f"{key}= with --schedule auto: {rule}; drop it, give {default} to rule it out, or "
                "name a schedule"
            )
    if args.dp_slices == "on":
        yield f"slices=on with --schedule auto: {_UNSHOWN}; drop it, or name a schedule"
    given = [(name, rule) for name, rule in _UNFIT.items() if getattr(args, name)]
    given += [(name, rule) for name, value, rule in _UNFIT_VALUES if getattr(args, name) == value]
    for name, rule in given:
        found = spelled("--" + name.replace("_", "-"), getattr(args, name))
        yield f"{found} with --schedule auto: {rule}; drop it, or name a schedule"


def may_defer(args: Namespace, schedule: str) -> bool:
    """Tell whether DP.sync may reach into the next iteration.

    With the distributed optimizer this gains nothing. With one hardware queue it would need slices,
    which the plan would have to place.
    """
    return (
        schedule == NAME
        and "step" not in args.schedule_keys
        and args.overlap_grad_reduce
        and not args.use_distributed_optimizer
        and not has_one_queue(args)
        and not any(share_problems(_with(args, backward_share=NAME), schedule))
    )


def may_delay(args: Namespace, schedule: str, num_segments: int) -> bool:
    """Tell whether weight gradients may be apart from their backwards."""
    as_if = _with(args, delay_weight_grads=NAME, segments=num_segments)
    is_left = schedule == NAME and "wgrad" not in args.schedule_keys
    return is_left and not any(weight_grad_problems(as_if, schedule, num_segments))


def may_replicate(args: Namespace, schedule: str, num_segments: int) -> bool:
    """Tell whether every replica may step some segments in full."""
    as_if = _with(args, replicate_optimizer=NAME, segments=num_segments)
    is_left = schedule == NAME and "optimizer" not in args.schedule_keys
    return is_left and not any(replication_problems(as_if, schedule, num_segments))


def keeps_forwards(args: Namespace) -> bool:
    """Tell whether results depend on the order of a rank's forwards, as with dropout's masks."""
    return any(getattr(args, name, None) for name in _DRAWS)


def keeps_sums(args: Namespace) -> bool:
    """Tell whether results may not even differ by the rounding of sums."""
    return bool(getattr(args, "deterministic_mode", False))


def _with(args: Namespace, **values: object) -> Namespace:
    return Namespace(**{**vars(args), **values})

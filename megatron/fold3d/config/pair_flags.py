"""``pairs=on``: the options that pairs of micro-batches exclude."""

from argparse import Namespace
from collections.abc import Iterator

from megatron.fold3d.plan.schedule_word import AUTO
from megatron.fold3d.plan.schedules import SPLIT_SCHEDULES

_FLAG = "pairs=on"
_DROP = "drop one of the two"


def pair_problems(args: Namespace, schedule: str) -> Iterator[str]:
    """Yield one message (found, rule, fix) per setting that pairs cannot run with."""
    if schedule == "stock":
        yield f"{_FLAG} with --schedule stock: only a plan has pairs; give --schedule aiao"
        return
    shares_experts = args.num_experts and args.expert_model_parallel_size > 1
    if args.tensor_model_parallel_size == 1 and not shares_experts:
        yield (
            f"{_FLAG} with --tensor-model-parallel-size 1: there is no tensor-parallel collective "
            "to overlap; drop it, or give at least 2"
        )
    if args.num_experts:
        yield from _expert_problems(args)
    for flag, dropout in (
        ("--attention-dropout", args.attention_dropout),
        ("--hidden-dropout", args.hidden_dropout),
    ):
        if dropout:
            yield (
                f"{_FLAG} with {flag} {dropout:g}: two micro-batches at a time draw other masks "
                f"than one after the other; give {flag} 0, or drop it"
            )
    if schedule in SPLIT_SCHEDULES:
        yield (
            f"{_FLAG} with --schedule {schedule}: weight gradients are computed apart for one "
            "micro-batch at a time; give --schedule 1f1b"
        )
    if args.timing_log_level > 1:
        yield (
            f"{_FLAG} with --timing-log-level {args.timing_log_level}: Megatron's timer of a "
            "forward measures one at a time; give --timing-log-level 1"
        )
    yield from _never_run(args)


def _expert_problems(args: Namespace) -> Iterator[str]:
    """Refuse experts whose two micro-batches would share more than the dispatcher's notes."""
    dispatcher, experts = args.moe_token_dispatcher_type, f"--num-experts {args.num_experts}"
    if dispatcher != "alltoall":
        yield (
            f"{_FLAG} with {experts} and --moe-token-dispatcher-type {dispatcher}: only an "
            "all-to-all hands over; give --moe-token-dispatcher-type alltoall"
        )
    for flag, is_there in (
        ("--moe-input-jitter-eps", args.moe_input_jitter_eps is not None),
        ("--moe-router-force-load-balancing", args.moe_router_force_load_balancing),
        ("--moe-enable-routing-replay", getattr(args, "moe_enable_routing_replay", False)),
    ):
        if is_there:
            yield (
                f"{_FLAG} with {experts} and {flag}: it draws or records in the order in which "
                f"micro-batches run; {_DROP}"
            )


def _never_run(args: Namespace) -> Iterator[str]:
    """Refuse options with process-wide state or further collectives, untested with pairs."""
    for flag, value, is_there in (
        ("--transformer-impl", args.transformer_impl, args.transformer_impl != "local"),
        ("--mtp-num-layers", args.mtp_num_layers, args.mtp_num_layers),
        (
            "--context-parallel-size",
            args.context_parallel_size,
            args.context_parallel_size > 1,
        ),
        ("step=next", None, args.backward_share is not None),
        (
            "--offload-activations",
            args.offload_activations,
            args.offload_activations != "off",
        ),
        (
            "--microbatch-group-size-per-virtual-pipeline-stage",
            args.microbatch_group_size_per_vp_stage,
            args.microbatch_group_size_per_vp_stage,
        ),
        ("ahead=auto", None, args.forwards_ahead == AUTO),
        ("--shard-segments", args.shard_segments, args.shard_segments != "off"),
        ("slices=on", None, args.dp_slices == "on"),
        ("--tp-comm-overlap", None, args.tp_comm_overlap),
        ("--distribute-saved-activations", None, args.distribute_saved_activations),
        ("wgrad=", None, args.delay_weight_grads),
        ("--preemptive-comm", None, args.preemptive_comm),
    ):
        if is_there:
            found = flag if value is None else f"{flag} {value}"
            yield f"{_FLAG} with {found}: never shown to train what stock does; {_DROP}"

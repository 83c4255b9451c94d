"""Settings: texts by which tables and pages name what a command line asks for.

A *setting* is one of these:

    --num-experts                        a flag that is given, and not off
    --segments auto                      a flag with this value
    --optimizer other than adam or sgd   a flag with another value than these
    --timing-log-level above 1           a flag with a larger number
    wgrad=gaps                           a part of the word
    wgrad=                               parts of the word with another value than the default
    one replica                          a name in `_NAMED`
    --num-experts and biases             two settings at once
"""

from argparse import Namespace
from collections.abc import Callable, Mapping
from importlib import metadata

from megatron.fold3d.config.job_sizes import num_replicas
from megatron.fold3d.config.recompute_flags import engine_modules, offloads_everything, recomputes
from megatron.fold3d.config.schedule_flags import measures_shares, parts_of, spelled_parts, word_of
from megatron.fold3d.config.segment_flags import num_segments
from megatron.fold3d.config.spelling import named, typed
from megatron.fold3d.plan.choice import file_of
from megatron.fold3d.plan.schedule_word import AUTO, STOCK, VALUES
from megatron.fold3d.plan.schedules import SPLIT_SCHEDULES

# Attributes whose names differ from the flags that set them.
_ATTRIBUTES = {
    "--fp8-format": "fp8",
    "--fp4-format": "fp4",
    "--use-nccl-ub": "nccl_ub",
    "--no-overlap-p2p-communication": "overlap_p2p_comm",
    "--microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group_size_per_vp_stage",
}
_OLDEST_ENGINE = 2, 8  # Megatron's own minimum for --delay-wgrad-compute
_OFF: tuple[object, ...] = (None, False, "", "off", "none", (), [])  # and 0, which equals False


# Settings with which forwards draw random numbers, in the order of a rank's forwards.
DRAWS = (
    "--attention-dropout",
    "--hidden-dropout",
    "--num-experts and --moe-input-jitter-eps",
    "--num-experts and --moe-router-force-load-balancing",
    "--num-experts and --moe-router-force-biased",
)


def attribute_of(flag: str) -> str:
    """Return the attribute of Megatron's namespace that a flag sets."""
    return _ATTRIBUTES.get(flag, flag[2:].replace("-", "_"))


def asked(args: Namespace, setting: str) -> str:
    """Return how the user gave a setting, as typed; empty if the namespace does not have it."""
    if " and " in setting:
        parts = [asked(args, part) for part in setting.split(" and ")]
        return " and ".join(parts) if all(parts) else ""
    key, is_part, part = setting.partition("=")
    if is_part and key in VALUES and setting not in _NAMED:
        return spelled_parts(args, key, part)
    flag, *rest = setting.split()
    # Validation deletes the attributes of some deprecated flags.
    value = getattr(args, attribute_of(flag), None)
    if flag == "--schedule":
        value = word_of(args).order  # the word also has other parts
    if setting in _NAMED:
        found = _NAMED[setting](args)
        if isinstance(found, str):
            return found
    elif not rest:
        found = value not in _OFF
    elif rest[0] == "other":
        found = value is not None and str(value) not in rest
    elif rest[0] == "above":
        found = value is not None and value > int(rest[1])
    else:
        found = str(value) == rest[0]
    if not found:
        return ""
    return typed(flag, value) if flag.startswith("--") else setting


def _named_of(schedules: Callable[[str], bool]) -> Callable[[Namespace], str]:
    def found(args: Namespace) -> str:
        schedule = word_of(args).order
        return named(schedule) if schedules(schedule) else ""

    return found


def _more_shards(shards: str, ranks: str) -> Callable[[Namespace], bool]:
    """Return a test whether weights have more shards than there are tensor-parallel ranks."""

    def found(args: Namespace) -> bool:
        num_ranks = getattr(args, ranks) or args.tensor_model_parallel_size
        return bool((getattr(args, shards) or num_ranks) > num_ranks)

    return found


def _shards_layers(args: Namespace) -> bool:
    # Validation replaces one attribute by the other.
    sharded = args.use_distributed_optimizer or getattr(
        args, "use_layer_wise_distributed_optimizer", False
    )
    return args.optimizer == "dist_muon" or (args.optimizer not in ("adam", "sgd") and sharded)


def _recomputes_selectively(args: Namespace) -> str:
    by_short_form = getattr(args, "recompute_activations", False)
    is_selective = args.recompute_granularity not in (None, "full") or by_short_form
    return "--recompute-granularity selective" if is_selective else ""


def _weights_apart(args: Namespace) -> str:
    found = spelled_parts(args, "wgrad")
    return "W in the plan" if found and file_of(word_of(args).order) else found


def _split_backwards(args: Namespace) -> str:
    schedule = word_of(args).order
    return named(schedule) if schedule in SPLIT_SCHEDULES else _weights_apart(args)


def ties_embeddings(args: Namespace) -> bool:
    """Tell whether the first and the last stage, on two ranks, hold the same word embeddings.

    The last stage has them as its head, or again for multi-token prediction with any head.
    """
    held_twice = args.mtp_num_layers or not args.untie_embeddings_and_output_weights
    return bool(held_twice and args.pipeline_model_parallel_size > 1)


def _half_replicated_embeddings(args: Namespace) -> str:
    """Return the setting that ties two segments, if only one of them is replicated."""
    ends = {0, max(0, num_segments(args) - 1)}
    parts = parts_of(args, "optimizer", "replicated")
    replicated = ends & {number for part in parts for number in part.segments or ends}
    is_half = len(replicated) == 1 < len(ends)
    if not is_half or not ties_embeddings(args):
        return ""
    untied = args.untie_embeddings_and_output_weights
    return typed("--mtp-num-layers", args.mtp_num_layers) if untied else "tied embeddings"


def _old_engine(_: Namespace) -> str:
    """Return the installed Transformer Engine with its version if it is too old; else nothing.

    Only the first two numbers count. The package is not imported.
    """
    try:
        text = metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return ""
    version = ".".join(text.split(".")[:2])
    is_old = tuple(map(int, version.split("."))) < _OLDEST_ENGINE
    return f"Transformer Engine {version}" if is_old else ""


def _in_word(key: str) -> Callable[[Namespace], str]:
    return lambda args: "" if word_of(args).value(key) is None else f"{key}="


_STOCKS_ORDER = ("1f1b", "interleaved")
_LAYOUT = "--pipeline-model-parallel-layout"

_NAMED: Mapping[str, Callable[[Namespace], bool | str]] = {
    # The order of computation.
    "stock's schedule": _named_of(lambda schedule: schedule == STOCK),
    "--trace of stock's schedule": lambda args: bool(args.trace) and word_of(args).order == STOCK,
    "a schedule of ours": _named_of(lambda schedule: schedule != STOCK),
    "another order than stock's": _named_of(lambda name: name not in (STOCK, *_STOCKS_ORDER)),
    "a schedule with groups": _named_of(lambda name: name in ("interleaved", AUTO)),
    "a schedule without groups": _named_of(
        lambda schedule: schedule not in (STOCK, "interleaved", AUTO)
    ),
    "a plan file": _named_of(lambda schedule: file_of(schedule) is not None),
    # Parts of the word.
    "step=next with measured shares": measures_shares,
    "share=": _in_word("share"),
    "wgrad=": _weights_apart,
    "weight gradients apart": _split_backwards,
    "weight gradients apart in Megatron's layers": lambda args: (
        _split_backwards(args) if args.transformer_impl != "transformer_engine" else ""
    ),
    "weight gradients apart in Transformer Engine's": lambda args: (
        _split_backwards(args) if args.transformer_impl == "transformer_engine" else ""
    ),
    "wgrad= in the word": _in_word("wgrad"),
    "recompute= in the word": _in_word("recompute"),
    "slices= in the word": _in_word("slices"),
    # Megatron's flags with a condition.
    "--tensor-parallel-num-weight-shards above the ranks": _more_shards(
        "tensor_parallel_num_weight_shards", "tensor_model_parallel_size"
    ),
    "--expert-tensor-parallel-num-weight-shards above the ranks": _more_shards(
        "expert_tensor_parallel_num_weight_shards", "expert_tensor_parallel_size"
    ),
    # Without virtual stages, validation turns the overlap off by itself.
    "--no-overlap-p2p-communication": lambda args: (
        not (
            args.overlap_p2p_comm
            or getattr(args, "virtual_pipeline_model_parallel_size", 1) is None
        )
    ),
    "--optimizer that shards whole layers": _shards_layers,
    f"{_LAYOUT} with an m before the last stage": lambda args: (
        "m" in (args.pipeline_model_parallel_layout or "").rpartition("|")[0]
    ),
    "--moe-router-force-biased": lambda args: (
        getattr(args, "moe_router_force_biased", None) is not None  # 0 draws numbers too
    ),
    # Scales depend on what a rank has computed before, and so on its order.
    "--fp8-format with --fp8-recipe delayed": lambda args: (
        bool(args.fp8) and args.fp8_recipe == "delayed"
    ),
    "--microbatch-group-size-per-virtual-pipeline-stage below the ranks": lambda args: (
        args.microbatch_group_size_per_vp_stage is not None
        and args.microbatch_group_size_per_vp_stage < args.pipeline_model_parallel_size
    ),
    "--tensor-model-parallel-size 1 unless ranks share experts": lambda args: (
        args.tensor_model_parallel_size == 1
        and not (args.num_experts and args.expert_model_parallel_size > 1)
    ),
    "--recompute-granularity selective": _recomputes_selectively,
    "--recompute-granularity full": lambda args: (
        args.recompute_granularity == "full" or args.recompute_layers is not None
    ),
    "--recompute-modules of the engine": engine_modules,
    "--recompute-modules mla_up_proj": lambda args: "mla_up_proj" in (args.recompute_modules or ()),
    "--segments auto for given numbers": lambda args: (
        args.segments == AUTO and args.recompute_layers != AUTO
    ),
    # Settings without a flag.
    "Megatron-Bridge": lambda args: getattr(args, "of_bridge", False),
    "one replica": lambda args: num_replicas(args) == 1,
    "parameters in fp32": lambda args: not (args.bf16 or args.fp16),
    "gradients in fp16": lambda args: args.fp16 and not args.accumulate_allreduce_grads_in_fp32,
    "one segment": lambda args: num_segments(args) == 1,
    "several segments": lambda args: args.segments == AUTO or num_segments(args) > 1,
    "half of tied embeddings": _half_replicated_embeddings,
    "full recomputation": lambda args: args.recompute_granularity == "full",
    "recomputation": lambda args: recomputes(args) or offloads_everything(args),
    "fused weight gradients": lambda args: args.gradient_accumulation_fusion,
    "biases": lambda args: args.add_bias_linear,
    "Transformer Engine before 2.8": _old_engine,
}

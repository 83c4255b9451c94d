"""The options of Megatron that cannot work with a schedule of ours, one row each.

A row names the attribute that its flag sets in Megatron's namespace; a test looks each up in the
installed Megatron's parser. ``stock`` is Megatron's own schedule, and works with every option.
"""

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from megatron.fold3d.plan.schedules import SCHEDULES

OURS = frozenset({*SCHEDULES, "auto", "plan-file"})


@dataclass(frozen=True, slots=True)
class Refusal:
    """One option that is refused.

    Attributes:
        flag: as the user spells it.
        attribute: the attribute that the flag sets in Megatron's namespace.
        rule: why it cannot work.
        fix: the way out, such as another flag.
        found: whether a namespace asks for it; by default, whether the attribute is set.
        schedules: the schedules with which it cannot work.
    """

    flag: str
    attribute: str
    rule: str
    fix: str = "drop it, or use --schedule stock"
    found: Callable[[Namespace], bool] | None = None
    schedules: frozenset[str] = OURS

    def applies(self, args: Namespace, schedule: str) -> bool:
        """Return True if ``args`` asks for this option under ``schedule``."""
        if schedule not in self.schedules:
            return False
        # Validation deletes the attributes of some deprecated flags.
        return self.found(args) if self.found else bool(getattr(args, self.attribute, None))


def refusals(args: Namespace, schedule: str) -> Iterator[str]:
    """Yield one message (found, rule, fix) per option in ``args`` that ``schedule`` refuses."""
    yield from refused(REFUSALS, args, schedule, named(schedule))


def refused(rows: Iterable[Refusal], args: Namespace, schedule: str, beside: str) -> Iterator[str]:
    """Yield one message (found, rule, fix) per row that applies; ``beside`` is what refuses it."""
    for row in rows:
        if row.applies(args, schedule):
            found = spelled(row.flag, getattr(args, row.attribute))
            yield f"{found} with {beside}: {row.rule}; {row.fix}"


def spelled(flag: str, value: object) -> str:
    """Return a flag and its value as a user types them."""
    if isinstance(value, bool) or "=" in flag:  # or a part of the word, which has its value
        return flag
    return " ".join([flag, *map(str, value if isinstance(value, list) else [value])])


def named(schedule: str) -> str:
    """Return the flag that picks a schedule."""
    return f"--schedule {'plan=FILE' if schedule == 'plan-file' else schedule}"


def _more_shards(shards: str, ranks: str) -> Callable[[Namespace], bool]:
    """Return True if weights are cut into more shards than there are tensor-parallel ranks."""

    def found(args: Namespace) -> bool:
        num_ranks = getattr(args, ranks) or args.tensor_model_parallel_size
        return bool((getattr(args, shards) or num_ranks) > num_ranks)

    return found


def _blocking_p2p(args: Namespace) -> bool:
    # Without virtual stages, validation turns the overlap off by itself.
    turned_off = getattr(args, "virtual_pipeline_model_parallel_size", 1) is None
    return not (args.overlap_p2p_comm or turned_off)


def _group_below_ranks(args: Namespace) -> bool:
    group_size = args.microbatch_group_size_per_vp_stage
    return group_size is not None and bool(group_size < args.pipeline_model_parallel_size)


def _shards_layers(args: Namespace) -> bool:
    # Validation replaces one attribute by the other.
    sharded = args.use_distributed_optimizer or getattr(
        args, "use_layer_wise_distributed_optimizer", False
    )
    return args.optimizer == "dist_muon" or (args.optimizer not in ("adam", "sgd") and sharded)


def scales_by_order(args: Namespace) -> bool:
    """Return True if fp8 scales follow from what a rank has computed before, in whatever order."""
    return bool(args.fp8) and args.fp8_recipe == "delayed"


_GRAPH = "a captured graph replays the order and the buffers that it was captured with"
_FSDP = "it replaces the gradient buckets of Megatron's DDP, which a schedule reduces"
_COMBINED = "it replaces the schedule by one that runs a forward and a backward as one"
_GTP = "gathers of weights are chained in the order in which the first iteration used them"
_ONE_SIZE = "a plan is for one number of micro-batches"

REFUSALS = (
    # Options that fix the order of an iteration.
    Refusal(
        "--cuda-graph-impl",
        "cuda_graph_impl",
        _GRAPH,
        found=lambda args: args.cuda_graph_impl != "none",
    ),
    Refusal("--enable-cuda-graph", "enable_cuda_graph", _GRAPH),
    Refusal("--external-cuda-graph", "external_cuda_graph", _GRAPH),
    Refusal("--optimizer-cuda-graph", "optimizer_cuda_graph", _GRAPH),
    Refusal(
        "--fine-grained-activation-offloading",
        "fine_grained_activation_offloading",
        "it learns from the order of stock's first iteration when to copy which tensor",
        "use --recompute-granularity selective",
    ),
    Refusal(
        "--cpu-offloading-num-layers",
        "cpu_offloading_num_layers",
        "it expects every backward right after its forward",
        "use --recompute-granularity full",
    ),
    Refusal(
        "--moe-paged-stash",
        "moe_paged_stash",
        "its pages are laid out by the order of stock's first iteration",
        "use --moe-layer-recompute",
    ),
    Refusal(
        "--tensor-parallel-num-weight-shards",
        "tensor_parallel_num_weight_shards",
        _GTP,
        found=_more_shards("tensor_parallel_num_weight_shards", "tensor_model_parallel_size"),
    ),
    Refusal(
        "--expert-tensor-parallel-num-weight-shards",
        "expert_tensor_parallel_num_weight_shards",
        _GTP,
        found=_more_shards(
            "expert_tensor_parallel_num_weight_shards", "expert_tensor_parallel_size"
        ),
    ),
    # Options that replace the schedule, or the loop around it.
    Refusal(
        "--overlap-moe-expert-parallel-comm",
        "overlap_moe_expert_parallel_comm",
        _COMBINED,
        "give --schedule aiao:pairs=on, or use --schedule stock",
    ),
    Refusal("--delay-wgrad-compute", "delay_wgrad_compute", _COMBINED),
    Refusal(
        "--ep-overlap-early-attn-memory-release", "ep_overlap_early_attn_memory_release", _COMBINED
    ),
    Refusal(
        "--defer-embedding-wgrad-compute",
        "defer_embedding_wgrad_compute",
        "stock's schedules compute the deferred gradients at their end, a plan does not",
        "drop it",
    ),
    Refusal(
        "--moe-expert-rank-capacity-factor",
        "moe_expert_rank_capacity_factor",
        "an iteration that overflows its buffers is run again, a plan is run once",
        "use --moe-expert-capacity-factor",
    ),
    Refusal(
        "--perform-rl-step",
        "perform_rl_step",
        "generation and training share an iteration, a plan has only training",
    ),
    Refusal(
        "--inprocess-restart",
        "inprocess_restart",
        "our process groups and buffers are made once, when the process starts",
        "start the job again from its last checkpoint, with --save and --load, as a requeued "
        "SLURM job does",
    ),
    # Options that change gradients, parameters or transfers in a way that plans do not expect.
    Refusal("--use-megatron-fsdp", "use_megatron_fsdp", _FSDP, "use --use-distributed-optimizer"),
    Refusal("--use-torch-fsdp2", "use_torch_fsdp2", _FSDP, "use --use-distributed-optimizer"),
    Refusal(
        "--optimizer",
        "optimizer",
        "with --use-distributed-optimizer it shards whole layers, but a plan cuts other buckets",
        "drop --use-distributed-optimizer, or use --schedule stock",
        found=_shards_layers,
    ),
    Refusal(
        "--hybrid-context-parallel",
        "hybrid_context_parallel",
        "micro-batches differ in length, and a plan's transfers have one shape",
        "use --context-parallel-size alone",
    ),
    Refusal(
        "--pipeline-model-parallel-layout",
        "pipeline_model_parallel_layout",
        "multi-token prediction before the last stage sends tensors of another shape",
        "move every m to the last stage",
        found=lambda args: "m" in (args.pipeline_model_parallel_layout or "").rpartition("|")[0],
    ),
    Refusal(
        "--use-ring-exchange-p2p",
        "use_ring_exchange_p2p",
        "a ring exchange blocks, but a plan's transfers overlap compute",
        "drop it",
    ),
    Refusal(
        "--no-overlap-p2p-communication",
        "overlap_p2p_comm",
        "a plan's transfers overlap compute",
        "drop it",
        found=_blocking_p2p,
    ),
    Refusal(
        "--pipeline-model-parallel-comm-backend",
        "pipeline_model_parallel_comm_backend",
        "a plan's transfers run in groups of their own, over NCCL or gloo",
        "drop it",
        found=lambda args: args.pipeline_model_parallel_comm_backend == "ucc",
    ),
    # Options whose results depend on the order of computations: see plan/recompute_order.py.
    Refusal(
        "--fp8-format",
        "fp8",
        "delayed scaling reads what a rank has computed last, and stock's order is another",
        "use --fp8-recipe tensorwise, or --schedule 1f1b or interleaved",
        found=scales_by_order,
        schedules=OURS - {"1f1b", "interleaved"},
    ),
    # Options that would have no effect, without a warning.
    Refusal(
        "--freeze-all-layers",
        "freeze_all_layers",
        "it freezes only models from a provider function, and ours is built from a configuration",
        "drop it",
    ),
    # Options that only some schedules read.
    Refusal(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "microbatch_group_size_per_vp_stage",
        "the schedule has no groups",
        "drop it, or use --schedule interleaved",
        schedules=OURS - {"interleaved", "auto"},
    ),
    Refusal(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "microbatch_group_size_per_vp_stage",
        "ranks wait for one another when a group is smaller than --pipeline-model-parallel-size",
        "give at least that many",
        found=_group_below_ranks,
        schedules=frozenset({"interleaved", "auto"}),
    ),
    Refusal(
        "--rampup-batch-size",
        "rampup_batch_size",
        _ONE_SIZE,
        "use --schedule",
        schedules=frozenset({"plan-file"}),
    ),
    Refusal(
        "--step-batch-size-schedule",
        "step_batch_size_schedule",
        _ONE_SIZE,
        "use --schedule",
        schedules=frozenset({"plan-file"}),
    ),
)

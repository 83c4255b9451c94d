"""The cost model's view of how a run is trained, from Megatron's flags."""

from argparse import Namespace
from itertools import chain

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron.fold3d.predict.cost_model.sizes import Recompute, Setup


def setup_of(args: Namespace, data_parallel: int) -> Setup:
    """Return the setup that the flags describe.

    Args:
        args: Megatron's namespace.
        data_parallel: replicas of the model.
    """
    is_16_bit = args.bf16 or args.fp16
    small = is_16_bit and not args.accumulate_allreduce_grads_in_fp32
    return Setup(
        tensor_parallel=args.tensor_model_parallel_size,
        data_parallel=data_parallel,
        microbatch_size=args.micro_batch_size,
        sequence_parallel=args.sequence_parallel,
        distributed_optimizer=args.use_distributed_optimizer,
        recompute=args.recompute_granularity or _without_recomputation(args),
        fp32=not is_16_bit,
        context_parallel=args.context_parallel_size,
        expert_parallel=args.expert_model_parallel_size,
        expert_tensor_parallel=args.expert_tensor_parallel_size or 0,
        small_gradients=small,
        accumulates_in_fp32=small
        and bool(args.ddp_param_name_patterns_for_fp32_local_accumulation),
        scatters_in_fp32=small and args.ddp_reduce_scatter_with_fp32_accumulation,
        local_layers=args.transformer_impl == "local",
        order="tp-pp-dp" if args.use_tp_pp_dp_mapping else "tp-dp-pp",
    )


def stage_layers(args: Namespace) -> tuple[int, ...]:
    """Return the layers of each stage, as Megatron splits them."""
    ranks = args.pipeline_model_parallel_size
    segments = args.virtual_pipeline_model_parallel_size or 1
    if (layout := args.pipeline_model_parallel_layout) is not None:
        if not isinstance(layout, PipelineParallelLayerLayout):
            layout = PipelineParallelLayerLayout(layout, ranks)
        return tuple(
            layout.layout[rank][segment].count(LayerType.decoder)
            for segment in range(segments)
            for rank in range(ranks)
        )
    first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
    embedding, loss = (
        int(getattr(args, f"account_for_{part}_in_pipeline_split"))
        for part in ("embedding", "loss")
    )
    rest = args.num_layers + embedding + loss - (first or 0) - (last or 0)
    others = ranks - (first is not None) - (last is not None)
    of_rank = [rest // others if others else 0] * ranks
    of_rank[0] = of_rank[0] if first is None else first
    of_rank[-1] = of_rank[-1] if last is None else last
    stages = list(chain.from_iterable([[n // segments for n in of_rank]] * segments))
    stages[0] -= embedding
    stages[-1] -= loss
    return tuple(stages)


def recomputed_layers(args: Namespace) -> tuple[int, ...]:
    """Return how many layers each stage recomputes where not all do; else nothing."""
    if args.recompute_method != "block":
        return ()
    split, counts = stage_layers(args), getattr(args, "recompute_layers", None)
    if counts == "auto":
        return (0,) * len(split)
    return tuple(counts or (min(n, args.recompute_num_layers) for n in split))


def _without_recomputation(args: Namespace) -> Recompute:
    """Fused attention keeps no scores and computes them again, as selective recomputation."""
    return "selective" if args.transformer_impl == "transformer_engine" else "none"

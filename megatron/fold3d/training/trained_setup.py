"""The cost model's view of how a run is trained, from Megatron's flags."""

from argparse import Namespace

from megatron.fold3d.predict.cost_model.sizes import Recompute, Setup


def setup_of(args: Namespace, data_parallel: int) -> Setup:
    """Return the setup that the flags describe.

    Args:
        args: Megatron's namespace.
        data_parallel: replicas of the model.
    """
    return Setup(
        tensor_parallel=args.tensor_model_parallel_size,
        data_parallel=data_parallel,
        microbatch_size=args.micro_batch_size,
        sequence_parallel=args.sequence_parallel,
        distributed_optimizer=args.use_distributed_optimizer,
        recompute=args.recompute_granularity or _without_recomputation(args),
        fp32=not (args.bf16 or args.fp16),
        context_parallel=args.context_parallel_size,
        expert_parallel=args.expert_model_parallel_size,
        order="tp-pp-dp" if args.use_tp_pp_dp_mapping else "tp-dp-pp",
    )


def _without_recomputation(args: Namespace) -> Recompute:
    """Fused attention keeps no scores and computes them again, as selective recomputation."""
    return "selective" if args.transformer_impl == "transformer_engine" else "none"

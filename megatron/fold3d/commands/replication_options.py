"""``optimizer=``: the segments stepped in full, given or chosen by simulation."""

from argparse import Namespace
from dataclasses import replace

from megatron.fold3d.commands.cost_options import Hardware, Source
from megatron.fold3d.config.schedule_flags import choice_of
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Features, lower
from megatron.fold3d.plan.ir import Op, Plan, stages_of
from megatron.fold3d.plan.ops import GATHER_OPS, WEIGHT_OPS
from megatron.fold3d.plan.schedule_word import AUTO, Part
from megatron.fold3d.predict.cost_model.sizes import replicated_bytes
from megatron.fold3d.predict.search.descent import Descent, Space
from megatron.fold3d.predict.search.judge import Judge
from megatron.fold3d.predict.search.replicated_costs import with_replicated
from megatron.fold3d.predict.simulator.execution import Execution
from megatron.fold3d.predict.simulator.simulate import simulate


def chosen_segments(
    args: Namespace, source: Source, order: Plan, grad_sync: str | None, *, reduces_early: bool
) -> tuple[int, ...]:
    """Return the segments whose optimizer steps every replica takes in full.

    Args:
        args: the command's arguments.
        source: costs and memory of a model that is updated in shards.
        order: the order that runs.
        grad_sync: where DP.sync goes, if the options say so.
        reduces_early: as in `Features`.

    Raises:
        ValueError: the flag cannot be simulated with another option.
    """
    given = args.replicate_optimizer
    found = "optimizer=auto" if given == AUTO else str(Part("optimizer", "replicated", given))
    if source.hardware is None or not source.gathers_params:
        raise ValueError(
            f"{found}: it chooses which segments are updated in shards; give --model, --cluster "
            "and --distributed-optimizer"
        )
    if grad_sync is not None or args.cuda_connections is not None or order.has(*GATHER_OPS):
        raise ValueError(
            f"{found}: it is simulated where an iteration waits for all gradients, with a queue "
            "for each stream; drop --grad-sync, step=next, --cuda-connections and gathers "
            "of a plan's own"
        )
    if given != AUTO:
        if unknown := [segment for segment in given if segment >= order.num_segments]:
            raise ValueError(
                f"{found}: there is no segment {unknown[0]}, a rank holds {order.num_segments}; "
                f"give some of 0 to {order.num_segments - 1}"
            )
        return tuple(given)

    hardware = source.hardware
    delayed = args.delay_weight_grads
    if reduces_early and delayed != AUTO:  # where they go depends on what is replicated
        order = order.select(frozenset(Op) - WEIGHT_OPS)
    first = choice_of(args, order.num_segments)
    features = Features(gathers_params=True, transfers=False, reduces_early=reduces_early)
    execution = Execution(
        in_order=True,
        preemptive=False,
        nic_of_rank=source.nic_of_rank,
        routes=source.routes,
        shard_shares=hardware.shard_shares,
    )
    peaks = hardware.peaks(simulate(lower(order, first, features), source.costs, execution))

    def fits(choice: Choice, _: Plan) -> bool:
        more = _more_bytes(hardware, order, choice.where(optimizer="replicated"))
        return max(map(sum, zip(peaks, more, strict=True))) <= hardware.usable_bytes

    judge = Judge(
        num_ranks=order.num_ranks,
        num_microbatches=order.num_microbatches,
        costs=source.costs,
        features=features,
        execution=execution,
        fits=fits,
        order=order,
    )
    tied = order.num_ranks > 1 and not hardware.shape.untied
    free = {"optimizer": ("sharded", "replicated")}
    search = Descent(judge, Space(orders=(first,), free=free, tied=tied))
    return search.best.where(optimizer="replicated")


def replicated_source(source: Source, order: Plan, segments: tuple[int, ...]) -> Source:
    """Return the costs and the memory of a model some of whose segments are replicated."""
    assert source.hardware is not None
    footprint = source.hardware.footprint
    more = zip(footprint.static_bytes, _more_bytes(source.hardware, order, segments), strict=True)
    footprint = replace(footprint, static_bytes=tuple(map(sum, more)))
    return replace(
        source,
        costs=with_replicated(source.costs, stages_of(segments, order.num_ranks)),
        hardware=replace(source.hardware, footprint=footprint),
    )


def _more_bytes(hardware: Hardware, order: Plan, segments: tuple[int, ...]) -> list[float]:
    return replicated_bytes(
        hardware.shape,
        hardware.setup,
        order.num_ranks,
        hardware.layers,
        stages_of(segments, order.num_ranks),
    )

"""``fold3d simulate --schedule auto``: the choices that training would try, with predictions."""

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron.fold3d.commands.cost_options import Hardware, Source, costs_of
from megatron.fold3d.commands.plan_source import in_words
from megatron.fold3d.commands.schedule_options import compute_plan, spelled
from megatron.fold3d.config.schedule_flags import choice_of
from megatron.fold3d.plan.choice import Choice, free_values, stock_schedule
from megatron.fold3d.plan.compile import Features
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.passes.place_weight_grads import HeldSizes
from megatron.fold3d.policy.predicted import Predicted
from megatron.fold3d.predict.cost_model.sizes import replicated_bytes
from megatron.fold3d.predict.search.descent import (
    Descent,
    Space,
    orders_worth_trying,
)
from megatron.fold3d.predict.search.judge import Judge
from megatron.fold3d.predict.simulator.execution import Execution

_UNFIT = (
    *("shard_segments", "grad_sync", "preemptive_comm", "cuda_connections", "grad_sync_launches"),
    *("iterations", "svg", "recompute_layers"),
)


def what_auto_would_try(args: Namespace) -> str:
    """Return what ``--schedule auto`` would try in training with these costs, as text or JSON.

    Raises:
        PlanError: not even stock's order can run.
        ValueError: an option has no reader.
    """
    if args.schedule_keys:
        raise ValueError(
            f"{args.schedule_keys[0]}= with --schedule auto: it says which settings training would "
            "try; drop it, or name a schedule"
        )
    for name in _UNFIT:
        if (value := getattr(args, name)) not in (None, False):
            flag = "--" + name.replace("_", "-")
            found = flag if value is True else f"{flag} {spelled(value)}"
            raise ValueError(
                f"{found} with --schedule auto: it says which settings training would try; drop "
                "it, or name a schedule"
            )
    for flag, value in (("--pp", args.pp), ("--microbatches", args.microbatches)):
        if value is None:
            raise ValueError(f"--schedule auto without {flag}: give {flag} N")
    segments = 1 if args.segments is None else args.segments
    plain = Namespace(**{**vars(args), "schedule": stock_schedule(segments)})
    order = compute_plan(plain)
    first = replace(choice_of(args, segments), order=plain.schedule)
    search = _search(costs_of(plain, order), first, order)
    tried = search.to_try()
    if args.json:
        rows = {"stock": _as_json(search.first), "tries": [_as_json(one) for one in tried]}
        return json.dumps(rows) + "\n"
    sizes = in_words(order.num_ranks, order.num_segments, order.num_microbatches)
    return "\n".join([f"auto: {sizes}", *lines(search.first, tried)]) + "\n"


def lines(stock: Predicted, tried: Sequence[Predicted]) -> Iterator[str]:
    """Yield what would be tried, and the speed-up over stock's order, in lines."""
    rows = [("stock's order", stock), *(("tries", one) for one in tried)]
    width = max(len(str(one.choice)) for _, one in rows)
    for title, one in rows:
        faster = "" if one is stock else f"  {stock.seconds / one.seconds:.2f} x"
        yield f"{title:<15}{one.choice!s:<{width}}  {one.seconds:.6g} s{faster}"
    if not tried:
        yield "nothing that fits is predicted to be faster"


def _as_json(one: Predicted) -> dict[str, object]:
    return {"schedule": str(one.choice), "seconds": one.seconds}


def _search(source: Source, first: Choice, order: Plan) -> Descent:
    hardware = source.hardware
    has_replicas = hardware is None or hardware.setup.data_parallel > 1
    gathers, may_overlap = source.gathers_params, source.cuda_connections != 1
    judge = Judge(
        num_ranks=order.num_ranks,
        num_microbatches=order.num_microbatches,
        costs=source.costs,
        features=Features(gathers_params=gathers, reduces_early=may_overlap, transfers=False),
        execution=Execution(
            in_order=True,
            preemptive=False,
            nic_of_rank=source.nic_of_rank,
            routes=source.routes,
            shard_shares=() if hardware is None else hardware.shard_shares,
        ),
        fits=lambda choice, plan: hardware is None or _fits(hardware, choice, plan),
        held=HeldSizes.counted if hardware is None else hardware.held_sizes,
    )
    reduces = any(source.costs.grad_sync_s)
    free = free_values(
        defers=has_replicas and not gathers and may_overlap and reduces,
        delays=any(source.costs.weight_s),
        replicates=has_replicas and gathers,
        reduces_early=may_overlap,
    )
    tied = hardware is not None and order.num_ranks > 1 and not hardware.shape.untied
    return Descent(judge, Space(orders=orders_worth_trying(judge, first), free=free, tied=tied))


def _fits(hardware: Hardware, choice: Choice, plan: Plan) -> bool:
    held = hardware.held_sizes(plan)
    more = replicated_bytes(
        hardware.shape,
        hardware.setup,
        plan.num_ranks,
        plan.num_stages,
        choice.stages(plan.num_ranks, optimizer="replicated"),
    )
    ranks = zip(held.peaks(plan), more, held.most, strict=True)
    return all(peak + extra <= most for peak, extra, most in ranks)

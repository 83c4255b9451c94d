"""``ahead=auto`` and ``wgrad=gaps``: the order that takes least time."""

from argparse import Namespace
from collections.abc import Callable

from megatron.fold3d.commands.cost_options import Source
from megatron.fold3d.commands.schedule_options import compute_plan
from megatron.fold3d.plan.compile import Features, lower
from megatron.fold3d.plan.ir import Plan, stages_of
from megatron.fold3d.plan.passes.place_weight_grads import HeldSizes
from megatron.fold3d.plan.passes.recompute import recompute_early
from megatron.fold3d.plan.schedule_word import AUTO
from megatron.fold3d.predict.search.order_choice import (
    Judge,
    at_most,
    check_most,
    choose_order,
    stage_times,
    worth_trying,
)
from megatron.fold3d.predict.simulator.execution import Execution
from megatron.fold3d.predict.simulator.simulate import simulate


def chosen_order(args: Namespace, source: Source, judge: Judge | None = None) -> tuple[str, Plan]:
    """Return the name and the plan of the order that takes least time.

    Args:
        args: the command's arguments.
        source: the source of the costs.
        judge: judges an order; by default an iteration is simulated with the costs alone.

    Raises:
        PlanError: no order can run, or memory has no room for any.
    """
    places = args.delay_weight_grads == AUTO
    if places:
        stage_times(source.costs)  # or there is nothing to place
    if args.most_activations is not None:
        check_most(compute_plan(_computing(args), 1), args.most_activations)
    auto_ahead = args.forwards_ahead == AUTO
    numbers = worth_trying(source.costs, args.pp, args.microbatches) if auto_ahead else (None,)

    def recomputing(plan: Plan) -> Plan:
        early = stages_of(args.recompute_early, plan.num_ranks)
        return recompute_early(plan, early, in_pairs=bool(args.overlap_tensor_parallel))

    choice = choose_order(
        lambda ahead: compute_plan(_computing(args), ahead),
        source.costs,
        judge or _judged_alone(source),
        forwards_ahead=numbers,
        places_weight_grads=places,
        sizes=_sizes(args, source),
        then=recomputing,
    )
    name = str(args.schedule)
    if auto_ahead:
        name += f":ahead={choice.forwards_ahead}"
    if choice.splits:
        name += ":wgrad=gaps"
    return name, choice.plan


def _sizes(args: Namespace, source: Source) -> Callable[[Plan], HeldSizes]:
    if args.most_activations is None and source.hardware is not None:
        return source.hardware.held_sizes
    return at_most(args.most_activations)


def _judged_alone(source: Source) -> Judge:
    execution = Execution(nic_of_rank=source.nic_of_rank, routes=source.routes, in_order=True)

    def judge(order: Plan) -> tuple[bool, float]:
        features = Features(gathers_params=source.gathers_params, transfers=False)
        plan = lower(order, features=features)
        timeline = simulate(plan, source.costs, execution)
        hardware = source.hardware
        fits = hardware is None or max(hardware.peaks(timeline)) <= hardware.usable_bytes
        return fits, timeline.period_s

    return judge


def _computing(args: Namespace) -> Namespace:
    return Namespace(**vars(args) | {"recompute_early": ()})

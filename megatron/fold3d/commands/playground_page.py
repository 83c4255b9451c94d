"""The page of ``fold3d simulate --html``: sliders that begin where the command line is."""

from argparse import Namespace
from collections.abc import Sequence

from megatron.fold3d.config.schedule_flags import WORD_DEFAULTS
from megatron.fold3d.observe.report.playground import (
    MOST_FORWARDS,
    Fixed,
    Settings,
    playground,
)
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.plan.schedule_word import AUTO
from megatron.fold3d.predict.simulator.costs import Costs

_PLAIN = frozenset(
    {
        *("command", "schedule", "pp", "segments", "microbatches", "grad_sync", "html", "svg"),
        *("json", "run", "flags", "forward_s", "backward_s", "p2p_s", "grad_sync_s"),
    }
)
"""Options that the page's sliders and buttons have, or that do not change the simulation."""


def playground_page(
    args: Namespace,
    name: str,
    plan: Plan,
    timeline: Timeline,
    costs: Costs,
    where: str,
) -> str:
    """Return the page.

    Args:
        args: the command's arguments.
        name: the name of the simulated plan.
        plan: the simulated plan.
        timeline: its timeline. It is shown as it is, unless the page simulates just that.
        costs: the costs whose means the sliders begin with.
        where: where DP.sync goes: serial, overlap or deferred.

    Raises:
        ValueError: the plan is too large for a page.
    """
    ranks, microbatches = plan.num_ranks, plan.num_microbatches
    if (forwards := plan.num_stages * microbatches) > MOST_FORWARDS:
        raise ValueError(
            f"--html {args.html}: {forwards} forwards; a browser simulates up to {MOST_FORWARDS} "
            "while a slider moves; give fewer --microbatches or --segments, or --svg"
        )

    def of_rank(seconds: Sequence[float]) -> float:
        return sum(seconds) / ranks

    forward_s = of_rank(costs.forward_s)
    if not forward_s:
        raise ValueError(
            f"--html {args.html}: forwards take no time, and the page counts in forwards; give "
            "--forward-s above zero"
        )
    others = set() if args.schedule is None else {args.schedule}
    settings = Settings(
        num_ranks=ranks,
        num_microbatches=microbatches,
        num_segments=plan.num_segments,
        backward=of_rank(costs.backward_s) / forward_s,
        transfer=costs.p2p_s / forward_s,
        grad_sync=of_rank(costs.grad_sync_s) / forward_s,
        forward_s=forward_s,
        where=where,
        forwards_ahead=args.forwards_ahead if isinstance(args.forwards_ahead, int) else 1,
        weight_grads_in_gaps=args.delay_weight_grads == AUTO,
        messages_first=bool(args.preemptive_comm),
        schedules=tuple({"1f1b", "interleaved", "aiao"} | others),
    )
    fixed = Fixed(name=name, timeline=timeline, peak_activations=peak_activations(plan))
    return playground(settings, None if _is_plain(args) else fixed)


def _is_plain(args: Namespace) -> bool:
    """Return True if the page simulates just what the command does."""
    known = _PLAIN.union(WORD_DEFAULTS)
    others = (value for option, value in vars(args).items() if option not in known)
    as_named = not (args.plan_file or args.schedule_keys)
    return as_named and all(value is None or value is False for value in others)

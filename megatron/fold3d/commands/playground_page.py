"""The page of ``fold3d simulate --html``: sliders that begin where the command line is."""

from collections.abc import Sequence
from pathlib import Path

from megatron.fold3d.observe.report.playground import BEGIN, MOST_FORWARDS, Fixed, playground
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.predict.search.judge import Simulated
from megatron.fold3d.predict.search.settled import PredictedRun


def playground_page(
    file: Path, name: str, run: PredictedRun, found: Simulated, *, is_plain: bool
) -> str:
    """Return the page.

    Args:
        file: the file that it is for.
        name: the name of the simulated run.
        run: the run, with the costs whose means the sliders begin with.
        found: its plan and its timeline, which is shown as it is unless the page simulates that.
        is_plain: whether it does.

    Raises:
        ValueError: the plan is too large for a page.
    """
    plan = found.plan
    ranks, microbatches = plan.num_ranks, plan.num_microbatches
    if (forwards := plan.num_stages * microbatches) > MOST_FORWARDS:
        raise ValueError(
            f"--html {file}: {forwards} forwards; a browser simulates up to {MOST_FORWARDS} "
            "while a slider moves; give fewer --microbatches or --segments, or --svg"
        )

    def of_rank(seconds: Sequence[float]) -> float:
        return sum(seconds) / ranks

    c, costs = run.candidate, run.known.costs
    forward_s = of_rank(costs.forward_s)
    if not forward_s:
        raise ValueError(
            f"--html {file}: forwards take no time, and the page counts in forwards; give "
            "--seconds forward=S above zero"
        )
    where = "deferred" if c.choice.carries else "overlap"
    settings = {
        "p": ranks,
        "m": microbatches,
        "ns": plan.num_segments,
        "transfer": costs.p2p_s / forward_s,
        "sync": of_rank(costs.grad_sync_s) / forward_s,
        "where": "serial" if c.sums_last else where,
        "ahead": c.choice.ahead or 1,
        "gaps": c.choice.fills_gaps,
        "first": c.preemptive,
        "shown": (*BEGIN["shown"], c.schedule),
    }
    fixed = Fixed(name=name, timeline=found.timeline, peak_activations=peak_activations(plan))
    return playground(
        settings,
        backward=of_rank(costs.backward_s) / forward_s,
        forward_s=forward_s,
        fixed=None if is_plain else fixed,
    )

"""What no order of a job's iteration is faster than, whichever optimizer it has.

`fold3d simulate` prints the bound of one plan (`predict.simulator.lower_bound`). Here it is the
least over an all-reduce and a distributed optimizer with any segments that every replica steps in
full, and with DP.sync between weight gradients. Costs are those of `scripts.bench.predict`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, combinations
from statistics import median

from megatron.fold3d.commands.console import faster
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job, lower
from megatron.fold3d.plan.ir import stages_of
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.predict.cost_model.coded_sync import summed_bits
from megatron.fold3d.predict.cost_model.estimate import estimate
from megatron.fold3d.predict.search.neighbours import units
from megatron.fold3d.predict.simulator.lower_bound import Bounds
from scripts.bench.predict import Simulation
from scripts.bench.summary import Run

TITLES = (
    *("cell", "stock, same layout", "bound, no clip", "at most", "ours", "gain"),
    *("bound, clips", "at most", "ours", "gain"),
)


_CODED_BITS = 3.5  # of a parameter that such a job gathers in its 16th iteration


def cells(job: Simulation, segment_counts: Sequence[int], runs: Sequence[Run]) -> list[str]:
    """Return what follows the first of `TITLES`, or nothing if too little was measured.

    Computations take as long as in the fastest iteration of the same model chunks on links that are
    not shaped, so that what the ranks need beside their paces counts. Ours is what
    ``--schedule auto`` took.

    Args:
        segment_counts: the numbers of model chunks per rank that it may have.
        runs: its runs, those without shaped links included.
    """
    shaped = {run.variant: median(run.times_ms) for run in runs if run.round and run.times_ms}
    stock_ms = min((ms for variant, ms in shaped.items() if variant.is_stock), default=0.0)
    factors = {count: _factor(job, count, runs) for count in (1, *segment_counts)}
    if not factors[1] or not stock_ms:
        return []
    jobs = {count: job.slower(factors[count] or factors[1]) for count in segment_counts}
    every = [bound for count in segment_counts for bound in _bounds(jobs[count], count)]
    found = [f"{stock_ms:.0f}"]
    for ending, bound_s in (  # whether a step waits for the gradients' norm
        ("-auto-unclipped", min(bound.sync_s or bound.order_s for bound in every)),
        ("", min(bound.norm_s or bound.order_s for bound in every)),
    ):
        name = f"chosen-s{segment_counts[-1]}"
        names = {f"{name}{ending}", f"{name}-do{ending}"}
        ours = [ms for variant, ms in shaped.items() if variant.name in names]
        found += [f"{1e3 * bound_s:.0f}", faster(stock_ms / (1e3 * bound_s) - 1)]
        found += [f"{min(ours):.0f}", faster(stock_ms / min(ours) - 1)] if ours else ["-", "-"]
    return found


def _factor(job: Simulation, num_segments: int, runs: Sequence[Run]) -> float | None:
    """Return how much longer iterations without shaped links are than simulated, if any ran."""
    found = []
    for run in runs:
        if run.round or not run.times_ms:
            continue
        try:
            simulated_ms = job.unshaped.iteration_ms(run.variant.flags)
        except ValueError:  # such as --schedule auto
            continue
        if job.candidate(run.variant.flags).num_segments == num_segments:
            found.append(median(run.times_ms) / simulated_ms)
    return max(1.0, min(found)) if found else None


def _bounds(job: Simulation, num_segments: int) -> Iterator[Bounds]:
    fp32, added = job.setup.fp32, None if job.setup.fp32 else job.num_microbatches
    summed = summed_bits(job.setup.gradient_bytes, added)
    codes = replace(job.setup, gathered_bits=0.0 if fp32 else _CODED_BITS, summed_bits=summed)
    known = estimate(
        job.shape,
        job.hosts,
        replace(codes, distributed_optimizer=True),
        num_ranks=job.num_ranks,
        num_segments=num_segments,
    )
    order = build(
        "aiao",
        num_ranks=job.num_ranks,
        num_segments=num_segments,
        num_microbatches=job.num_microbatches,
    )
    behind = Choice.plain("aiao", num_segments).changed(wgrad="behind")
    plan = lower(Job.of(order, behind, reduces_early=True))
    choices = units(num_segments, tied=not job.shape.untied)
    for number in range(len(choices) + 1):
        for some in combinations(choices, number):  # that every replica steps in full
            stages = stages_of(tuple(chain.from_iterable(some)), job.num_ranks)
            yield Bounds(plan, known.costs.with_replicated(stages), known.nic_of_rank)

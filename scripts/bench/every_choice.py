"""The fastest of all choices that ``--schedule auto`` has where every step clips, by simulation.

    .venv/bin/python -m scripts.bench.every_choice --slow-down 2 --only 'dp=2, recompute, 135mbit'

`Descent` improves a few choices, one segment at a time. Here is every choice: each set of
segments that every replica steps, and for each segment whether its weight gradients are computed in
its backwards, behind them, or behind all backwards of the rank. Sets of choices are left out if a
bound shows that none of them is faster than the best one by more than a given share. Where
reductions take much less time than the backward the bound shows little, and the search may not end.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron.fold3d.observe.timeline import Lane, Timeline
from megatron.fold3d.plan.choice import Choice, Wgrad
from megatron.fold3d.plan.compile import Features, lower
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.ops import SUM_OPS, TABLE
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.lower_bound import Bounds
from megatron.fold3d.predict.simulator.simulate import simulate
from scripts.bench import grid
from scripts.bench.bounds import distributed, replicated_sets
from scripts.bench.predict import Job

PLACES: tuple[Wgrad, ...] = ("last", "backward", "behind")
"""Where a segment's weight gradients may be computed."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A choice, of which the last segments, whose backwards come first, are fixed.

    Attributes:
        choice: weight gradients of the other segments are behind their backwards.
        num_fixed: the segments whose weight gradients have their place.
    """

    choice: Choice
    num_fixed: int = 0


class EveryChoice:
    """All choices of a job with the distributed optimizer, in one order of computation.

    Args:
        job: the job.
        order: forwards and backwards.
    """

    def __init__(self, job: Job, order: Plan) -> None:
        self._order, self._known = order, distributed(job, order.num_segments)
        self.replicated = tuple(replicated_sets(job, order.num_segments))
        self._link = self._known.link(preemptive=False)
        self._behind = Choice.plain("interleaved", order.num_segments).changed(wgrad="behind")
        self._all_behind = self._plan(self._behind)
        self.num_simulated = 0

    def least_s(self, within: float, most: int = sys.maxsize) -> float | None:
        """Return the time of the fastest choice.

        Args:
            within: no choice that is left out is faster by more than this share.
            most: how many iterations to simulate.

        Returns:
            Seconds, or None if more than ``most`` had to be simulated.
        """
        best_s = float("inf")
        todo = [
            Begun(self._behind.changed(segments, optimizer="replicated"))
            for segments in self.replicated
        ]
        while todo:
            if self.num_simulated >= most:
                return None
            begun = todo.pop()
            timeline = self._timeline(begun.choice)
            best_s = min(best_s, timeline.period_s)
            if self._bound_s(begun, timeline) < best_s * (1 - within):
                todo += self._next(begun)
        return best_s

    def _next(self, begun: Begun) -> Iterator[Begun]:
        """Yield the choices that place one segment more."""
        segment = self._order.num_segments - begun.num_fixed - 1
        for place in PLACES if segment >= 0 else ():
            yield Begun(begun.choice.changed((segment,), wgrad=place), begun.num_fixed + 1)

    def _timeline(self, choice: Choice) -> Timeline:
        self.num_simulated += 1
        return simulate(self._plan(choice), self._costs(choice), self._link)

    def _costs(self, choice: Choice) -> Costs:
        whole = choice.stages(self._order.num_ranks, optimizer="replicated")
        return self._known.costs.with_replicated(whole)

    def _plan(self, choice: Choice) -> Plan:
        features = Features(gathers_params=True, transfers=False, reduces_early=True)
        return lower(self._order, choice, features)

    def _bound_s(self, begun: Begun, timeline: Timeline) -> float:
        """Return what no choice with the same places is faster than.

        They all do the same until the first backward of a segment without a place. What is left
        then takes each rank and each link as long as it does here, whatever its order.
        """
        ranks, segment = self._order.num_ranks, self._order.num_segments - begun.num_fixed - 1
        if segment < 0:
            return timeline.period_s
        begin_s = min(
            span.start_s
            for spans in timeline.ranks
            for span in spans
            if span.action is not None
            and TABLE[span.action.op].kind == "backward"
            and span.action.stage // ranks == segment
        )
        costs = self._costs(begun.choice)
        outlast_s = Bounds(self._all_behind, costs, self._known.nic_of_rank).exposed_s
        bound_s = 0.0
        for rank, spans in enumerate(timeline.ranks):
            compute = (span for span in spans if span.lane is Lane.COMPUTE)
            left_s = sum(max(0.0, s.end_s - max(begin_s, s.start_s)) for s in compute)
            summed = {
                span.action.stage
                for span in spans
                if span.action is not None and span.action.op in SUM_OPS and span.start_s < begin_s
            }
            stages = range(rank, self._order.num_stages, ranks)
            assert costs.grad_sync_s is not None
            link_s = sum(costs.grad_sync_s[stage] for stage in stages if stage not in summed)
            bound_s = max(bound_s, begin_s + left_s + outlast_s[rank], begin_s + link_s)
        return bound_s


def main(argv: Sequence[str]) -> int:
    """Print the time of the fastest choice in each cell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="cells named so")
    parser.add_argument("--slow-down", type=float, default=1.0, help="of layers and links (1)")
    parser.add_argument(
        "--overhead", type=float, default=0.0, help="of computations, as a share of their time (0)"
    )
    parser.add_argument("--within", type=float, default=0.003, help="(0.003)")
    parser.add_argument("--most", type=int, default=5000, help="iterations to simulate (5000)")
    args = parser.parse_args(argv)
    for layout in grid.LAYOUTS:
        layout = replace(layout, slow_down=args.slow_down)
        for rate in grid.wanted(layout, args.only):
            job = Job.read(grid.arguments(layout, rate)).slower(1 + args.overhead)
            order = build(
                "interleaved",
                num_ranks=job.num_ranks,
                num_segments=layout.job().segment_counts[-1],
                num_microbatches=job.num_microbatches,
                group_size=job.num_microbatches,
            )
            every = EveryChoice(job, order)
            least_s = every.least_s(args.within, args.most)
            found = "not found" if least_s is None else f"{least_s * 1e3:.0f} ms"
            print(f"{layout.name}, {rate}: {found}, {every.num_simulated} simulated", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Traces without training: a simulated run, written down as its ranks would have recorded it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron.fold3d.observe.timeline import Lane, Span
from megatron.fold3d.observe.trace_files import Event, IterationTrace, RankTrace
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built, planned

_KINDS = {Lane.COMPUTE: "compute", Lane.WAIT: "wait", Lane.GRAD_SYNC: "grad_sync"}


def write_traces(
    folder: Path,
    schedule: str = "aiao",
    *,
    segments: int = 2,
    delayed: Sequence[int] = (),
    with_plan: bool = True,
    slower: float = 1.0,
    counts: Mapping[str, float] | None = None,
    flops: float = 0.0,
    recomputed: float = 0.0,
    shares_cores: bool = False,
) -> None:
    """Write the files of two pipeline ranks, two iterations of 8 micro-batches."""
    order = built(schedule, 2, segments, 8)
    plan = planned(delay_weight_grads(order, delayed))
    costs = Costs.uniform(
        plan.num_stages,
        forward_s=0.006 * slower,
        backward_s=0.012 * slower,
        p2p_s=0.002,
        grad_sync_s=0.05,
    )
    timeline = simulate(plan, costs, iterations=2)
    starts_s = (0.0, *timeline.iteration_ends_s(0))
    folder.mkdir(parents=True, exist_ok=True)
    for number, spans in enumerate(timeline.ranks):
        rows = [
            IterationTrace(
                iteration=4 + i,
                start_s=1e9 + starts_s[i],
                end_s=starts_s[i + 1] - starts_s[i],
                events=tuple(
                    _event(span, starts_s[i])
                    for span in spans
                    if span.iteration == i and span.lane in _KINDS
                ),
                gpu_memory_bytes=3 << 30,
                host_memory_bytes=2 << 30,
                counts=counts or {},
            )
            for i in range(2)
        ]
        trace = RankTrace(
            rank=number,
            pp_rank=number,
            dp_rank=0,
            tp_rank=0,
            num_ranks=2,
            num_segments=segments,
            num_microbatches=8,
            schedule=schedule if with_plan else "stock",
            plan=plan.to_text() if with_plan and number == 0 else "",
            iterations=tuple(rows),
            microbatch_flops=flops,
            recomputed_flops=recomputed,
            shares_cores=shares_cores,
        )
        (folder / trace.file_name).write_text(trace.to_json())


def _event(span: Span, zero_s: float) -> Event:
    return Event(span.word, span.start_s - zero_s, span.end_s - zero_s, _KINDS[span.lane])

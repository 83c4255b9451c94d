"""What one hardware queue costs: the best plans of `fold3d search`, played with 1 and 32 queues.

    .venv/bin/python -m scripts.bench.simulated_queues --model gpt3-18b --gigabits 25 100 200

Simulated; no GPU has run it. Each row is a configuration on 128 A100 with tp=8: the best ones that
are found, and the best of stock under the same rules, over which one queue has the gain.

    .venv/bin/python -m scripts.bench.simulated_queues --preemption

prints what preemption (paper Sec. V-A) gains in the paper's layouts, and whether one queue can have
it: AIAO, 4 segments, full recomputation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from megatron.fold3d.commands.console import faster
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import lower
from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.predict.cost_model.model_shape import ModelShape, model_shape
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.candidate_timeline import many_queues_s, timeline_of
from megatron.fold3d.predict.search.candidates import Candidate, estimate_of
from megatron.fold3d.predict.search.planner import search
from megatron.fold3d.predict.search.simulated_shares import auto_shares
from megatron.fold3d.predict.simulator.link import Device, Link
from megatron.fold3d.predict.simulator.simulate import simulate
from scripts.bench.options import parser_of
from scripts.bench.summary import markdown

PAPER = {"gpt3-18b": (2, 8), "gpt3-39b": (4, 16)}
"""Pipeline ranks and micro-batches of its A100 rows, with tp=8 and a batch of 256."""


def rows(
    shape: ModelShape, gigabits: float, batch_size: int, num_ranks: int | None, top: int
) -> Iterator[Sequence[str]]:
    """Yield a table's rows for one network."""
    gpus = cluster(f"a100x128-{gigabits:g}g")
    given = {"tensor_parallel": 8, **({"num_ranks": num_ranks} if num_ranks else {})}
    found = search(shape, gpus, global_batch_size=batch_size, top=top, given=given)
    stock = found.best_stock
    for choice in (*found.best, *([stock] if stock else ())):
        c = choice.candidate
        known = estimate_of(shape, gpus, c)
        one_s, many_s = (timeline_of(c, known, connections=n).period_s for n in (1, 32))
        gain = faster(stock.iteration_s / one_s - 1) if stock else ""
        ms = (f"{seconds * 1e3:.0f}" for seconds in (one_s, many_s))
        yield f"{gigabits:g}", _words(c), *ms, f"{one_s / many_s:.3f}", gain


def preemption(model: str, gigabits: float, *, sharded: bool) -> Sequence[str]:
    """Return a row: milliseconds with one queue and with 32, without preemption and with it.

    Slices that give way are what one queue could have at best: they stop at once for a transfer.
    The last column is TP.sync that one queue may hide and that 32 may not; no other column has it.

    Args:
        sharded: whether the optimizer is distributed; if not, DP.sync ends in the next forward.
    """
    pp, microbatches = PAPER[model]
    setup = Setup(
        tensor_parallel=8,
        data_parallel=16 // pp,
        microbatch_size=4,
        sequence_parallel=True,
        recompute="full",
        distributed_optimizer=sharded,
    )
    plain = Candidate(
        choice=Choice.plain("aiao", 4), setup=setup, num_ranks=pp, num_microbatches=microbatches
    )
    c = plain if sharded else plain.changed(step="next")
    gpus = cluster(f"a100x128-{gigabits:g}g")
    known = estimate_of(model_shape(model), gpus, c)
    rules = Link(nic_of_rank=known.nic_of_rank, preemptive=False)
    shares = () if sharded else auto_shares(lower(c.job, transfers=False), known.costs, rules)
    in_slices = replace(c.with_options(slices=True).job, shares=shares, receives_late=True)
    sliced = lower(in_slices)
    one = replace(rules, device=Device(connections=1))
    many_s, most_s = many_queues_s(c, known)
    seconds = (
        timeline_of(plain, known).period_s,
        simulate(sliced, known.costs, one, iterations=3).period_s,
        simulate(sliced, known.costs, replace(one, preemptive=True), iterations=3).period_s,
        many_s,
        timeline_of(replace(c, preemptive=True), known, connections=32).period_s,
        most_s - many_s,
    )
    words = f"{model} {'distributed optimizer' if sharded else 'split'} {gigabits:g}"
    return words, *(f"{s * 1e3:.0f}" for s in seconds)


def _words(c: Candidate) -> str:
    sizes = f"pp={c.num_ranks} segments={c.num_segments} micro-batch {c.setup.microbatch_size}"
    sharded = " distributed optimizer" if c.setup.distributed_optimizer else ""
    return f"{c.name} {sizes} recompute {c.setup.recompute}{sharded}"


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="gpt3-18b")
    parser.add_argument("--gigabits", type=float, nargs="+", default=[25.0, 100.0, 200.0])
    parser.add_argument("--global-batch-size", type=int, default=256)
    parser.add_argument("--pp", type=int, help="pipeline ranks (default: searched)")
    parser.add_argument("--top", type=int, default=3)
    parser.add_argument("--preemption", action="store_true", help="the paper's two layouts")
    args = parser.parse_args()
    titles: Sequence[str] = (
        "Gb/s",
        "configuration",
        "1 queue, ms",
        "32 queues",
        "ratio",
        "to stock",
    )
    shape, sizes = model_shape(args.model), (args.global_batch_size, args.pp, args.top)
    found = (row for rate in args.gigabits for row in rows(shape, rate, *sizes))
    if args.preemption:
        titles = ("ms", "1 queue", "slices", "that give way", "32", "preemption", "TP.sync")
        cases = product((False, True), PAPER, args.gigabits)
        found = (preemption(model, rate, sharded=sharded) for sharded, model, rate in cases)
    for line in markdown(titles, found):
        print(line, flush=True)


if __name__ == "__main__":
    main()

"""What one hardware queue costs: the best plans of `fold3d search`, played with 1 and 32 queues.

    .venv/bin/python -m scripts.bench.simulated_queues --model gpt3-18b --gigabits 25 100 200

Simulated; no GPU has run it. Each row is a configuration on 128 A100 with tp=8: the best ones that
are found, and the best of stock under the same rules.
"""

import argparse
from collections.abc import Iterator

from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.predict.cost_model.estimate import estimate
from megatron.fold3d.predict.cost_model.model_shape import ModelShape, model_shape
from megatron.fold3d.predict.search.candidate_timeline import timeline_of
from megatron.fold3d.predict.search.candidates import Candidate, Given
from megatron.fold3d.predict.search.planner import search


def rows(
    shape: ModelShape, gigabits: float, batch_size: int, num_ranks: int | None, top: int
) -> Iterator[str]:
    """Yield a table's rows for one network."""
    gpus = cluster(f"a100x128-{gigabits:g}g")
    given = Given(tensor_parallel=8, num_ranks=num_ranks)
    found = search(shape, gpus, global_batch_size=batch_size, top=top, given=given)
    stock = found.best_stock
    for choice in (*found.best, *([stock] if stock else ())):
        c = choice.candidate
        known = estimate(
            shape,
            gpus,
            c.setup,
            num_ranks=c.num_ranks,
            num_segments=c.num_segments,
            layers=c.layers,
        )
        one_s, many_s = (timeline_of(c, known, connections=n).period_s for n in (1, 32))
        gain = f"{stock.iteration_s / one_s:.3f}" if stock else ""
        yield (
            f"| {gigabits:g} | {_words(c)} | {one_s * 1e3:.0f} | {many_s * 1e3:.0f} | "
            f"{one_s / many_s:.3f} | {gain} |"
        )


def _words(c: Candidate) -> str:
    sizes = f"pp={c.num_ranks} segments={c.num_segments} micro-batch {c.setup.microbatch_size}"
    share = f" share {c.backward_share}" if c.backward_share is not None else ""
    sharded = " distributed optimizer" if c.setup.distributed_optimizer else ""
    return f"{c.name} {sizes} recompute {c.setup.recompute}{share}{sharded}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt3-18b")
    parser.add_argument("--gigabits", type=float, nargs="+", default=[25.0, 100.0, 200.0])
    parser.add_argument("--global-batch-size", type=int, default=256)
    parser.add_argument("--pp", type=int, help="pipeline ranks (default: searched)")
    parser.add_argument("--top", type=int, default=3)
    args = parser.parse_args()
    print("| Gb/s | configuration | 1 queue, ms | 32 queues | ratio | stock's best / 1 queue |")
    print("|--:|---|--:|--:|--:|--:|")
    for gigabits in args.gigabits:
        shape = model_shape(args.model)
        for row in rows(shape, gigabits, args.global_batch_size, args.pp, args.top):
            print(row, flush=True)


if __name__ == "__main__":
    main()

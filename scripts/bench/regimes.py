"""Where our schedules gain and where they do not: link rates against batch sizes, simulated.

    .venv/bin/python scripts/bench/regimes.py [--model gpt3-18b] [--node a100] [--gpus 128]

The split is fixed; each cell searches the rest twice, for stock Megatron and for us. It says by how
much ours is faster than the best of stock and, in brackets, how much of that one's iteration is
DP.sync and PP.sync that nothing hides.
"""

import argparse
import sys

from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.predict.cost_model.model_shape import ModelShape, model_shape
from megatron.fold3d.predict.search.candidates import Given
from megatron.fold3d.predict.search.planner import search


def cell(shape: ModelShape, name: str, batch_size: int, given: Given) -> str:
    """Return the gain of one regime."""
    found = search(shape, cluster(name), global_batch_size=batch_size, top=1, given=given)
    stock, best = found.best_stock, found.best[0]
    if stock is None:
        return "no stock fits"
    spent = stock.exposed
    gain = stock.iteration_s / best.iteration_s - 1
    hidden = (spent.share(seconds) for seconds in (spent.grad_sync_s, spent.p2p_s))
    return f"{gain:+.1%} ({' + '.join(f'{share:.0%}' for share in hidden)})"


def main() -> int:
    """Print a table: a row per link rate, a column per batch size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="gpt3-18b")
    parser.add_argument("--node", default="a100")
    parser.add_argument("--gpus", type=int, default=128)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--gigabits", type=int, nargs="+", default=(25, 50, 100, 200, 400, 1600))
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=(128, 256, 1024))
    args = parser.parse_args()
    given = Given(tensor_parallel=args.tp, num_ranks=args.pp)
    try:
        shape = model_shape(args.model)
        cluster(f"{args.node}x{args.gpus}")
    except ValueError as error:
        parser.error(str(error))
    print(f"| Gb/s per node | {' | '.join(f'batch {size}' for size in args.batch_sizes)} |")
    print("|--:" * (1 + len(args.batch_sizes)) + "|")
    for gigabits in args.gigabits:
        name = f"{args.node}x{args.gpus}-{gigabits}g"
        cells = [cell(shape, name, size, given) for size in args.batch_sizes]
        print(f"| {gigabits} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

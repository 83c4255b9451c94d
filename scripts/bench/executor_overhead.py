"""What it costs to run a plan: stock's interleaved schedule and ours, on the demo's shape, in turn.

    .venv/bin/python -m scripts.bench.executor_overhead --rounds 5

Both train the same model with the same flags, A B A B; the first of a round alternates. A run
counts with the median of its iterations after warm-up. Exits with 1 if the ratio of the medians
is above the limit.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from tqdm import tqdm

from megatron.fold3d.observe.training_log import Spread, parse

LIMIT = 1.02
SCHEDULES = ("stock", "interleaved")
RANKS, PIPELINE, SEGMENTS, MICROBATCHES = 4, 2, 2, 8
WARM_UP = 3  # iterations
TIMEOUT_S = 900.0
MODEL = f"""
    --device cpu --num-layers 16 --hidden-size 128 --num-attention-heads 4
    --seq-length 128 --max-position-embeddings 128 --attention-dropout 0 --hidden-dropout 0
    --mock-data --tokenizer-type NullTokenizer --vocab-size 255 --num-workers 0
    --micro-batch-size 1 --global-batch-size {MICROBATCHES * RANKS // PIPELINE}
    --lr 1e-3 --eval-iters 0 --eval-interval 1000 --log-interval 1 --overlap-grad-reduce
    --pipeline-model-parallel-size {PIPELINE} --segments {SEGMENTS}
""".split()
ROOT = Path(__file__).parents[2]


def run(schedule: str, iterations: int) -> Spread:
    """Train and return the times of its iterations after warm-up.

    Raises:
        RuntimeError: the run failed, or logged fewer iterations.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(RANKS), "pretrain_gpt.py", *MODEL),
        *("--schedule", schedule, "--train-iters", str(iterations + WARM_UP)),
    ]
    job = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    times_ms = [row.elapsed_ms for row in parse(job.stdout) if row.number > WARM_UP]
    if job.returncode != 0 or len(times_ms) != iterations:
        raise RuntimeError(f"--schedule {schedule}: exit code {job.returncode}\n{job.stderr}")
    return Spread.of(times_ms)


def main(argv: Sequence[str] | None = None) -> int:
    """Run both schedules in turn and compare them; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--iterations", type=int, default=20, metavar="N", help="after warm-up")
    args = parser.parse_args(argv)
    runs: dict[str, list[Spread]] = {schedule: [] for schedule in SCHEDULES}
    with tqdm(total=args.rounds * len(SCHEDULES), unit="run", disable=None) as progress:
        for number in range(args.rounds):
            for schedule in SCHEDULES if number % 2 == 0 else SCHEDULES[::-1]:
                progress.set_description(schedule)
                runs[schedule].append(run(schedule, args.iterations))
                progress.update()

    print(f"load of this machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("ms per iteration, median (quartiles), each run and then of the runs' medians")
    medians = {}
    for schedule, spreads in runs.items():
        of_runs = Spread.of([spread.median_ms for spread in spreads])
        medians[schedule] = of_runs.median_ms
        print(f"{schedule:12} {'  '.join(map(str, spreads))}  | {of_runs}")
    pairs = zip(runs["interleaved"], runs["stock"], strict=True)
    by_round = [ours.median_ms / stock.median_ms for ours, stock in pairs]
    ratio = medians["interleaved"] / medians["stock"]
    print(f"ratio {ratio:.3f} (limit {LIMIT}), median of the rounds' ratios {median(by_round):.3f}")
    return 0 if ratio <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())

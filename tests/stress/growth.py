"""Train thousands of iterations and see whether memory, threads or open files of a rank grow.

python -m tests.stress.growth --iterations 5000
python -m tests.stress.growth --iterations 200 --ours "--schedule aiao --shard-segments weights ..."
"""

import argparse
import os
import shlex
import sys
from itertools import count
from pathlib import Path
from typing import Any

from tests.distributed import run_distributed
from tests.end_to_end.training import watch
from tests.stress.flag_sets import MODEL

NUM_RANKS = 2
RUN = (
    f"{MODEL} --num-layers 4 --micro-batch-size 1 --global-batch-size 2 --eval-iters 0 "
    "--eval-interval 1000 --pipeline-model-parallel-size 2 --segments 2 --bf16 "
    "--overlap-grad-reduce --log-interval 100 --distributed-timeout-minutes 1"
)
OURS = "--schedule aiao:step=next:share=0.5 --preemptive-comm"

SAMPLES = 10
WARM_UP = 2  # samples in which pools and caches fill
MOST_GROWTH_BYTES = 2 << 20

Sample = tuple[int, int, int]  # bytes, threads, open files


def main() -> int:
    """Return 1 if anything has grown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--iterations", type=int, default=5000)
    parser.add_argument("--ours", default=OURS, help="flags of the schedule")
    parser.add_argument("--ranks", type=int, default=NUM_RANKS)
    options = parser.parse_args()
    ranks = run_distributed(
        train_and_sample, options.ranks, options.iterations, options.ours, timeout_s=36000
    )
    for rank, samples in enumerate(ranks):
        sizes = ", ".join(f"{size / 2**20:.1f}" for size, _, _ in samples)
        print(f"rank {rank}: MiB {sizes}; threads {samples[-1][1]}; open files {samples[-1][2]}")
    grown = [f"rank {rank}: {what}" for rank, s in enumerate(ranks) for what in growth(s)]
    print("\n".join(grown) or f"nothing has grown in {options.iterations} iterations")
    return int(bool(grown))


def train_and_sample(iterations: int, ours: str) -> list[Sample]:
    """Train on this rank; returns what it holds at equal distances."""
    from megatron.training import training

    import pretrain_gpt

    samples: list[Sample] = []
    numbers = count(1)

    def sample(*_: Any, **__: Any) -> None:
        if next(numbers) % (iterations // SAMPLES) == 0:
            samples.append(_sample())

    watch(training, "train_step", after=sample)
    length = f"--train-iters {iterations} --lr-decay-iters {2 * iterations}"
    assert pretrain_gpt.main(shlex.split(f"{RUN} {length} {ours}")) == 0
    return samples


def growth(samples: list[Sample]) -> list[str]:
    """Name what grew after warm-up."""
    first, last = samples[WARM_UP], samples[-1]
    found = []
    if last[0] - first[0] > MOST_GROWTH_BYTES:
        found.append(f"memory grew from {first[0]} to {last[0]} bytes")
    for index, what in ((1, "threads"), (2, "open files")):
        if last[index] > first[index]:
            found.append(f"{what} grew from {first[index]} to {last[index]}")
    return found


def _sample() -> Sample:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    return resident, threads, sum(1 for _ in Path("/proc/self/fd").iterdir())


if __name__ == "__main__":
    sys.exit(main())

"""Train a small GPT with stock Megatron and with AIAO on this machine, and compare.

Four ranks, a pipeline of two and two replicas, the same data and seed. The losses of both runs
must agree in every digit that Megatron prints; what differs is the order. A picture of both, and a
page of each, show what each rank did when.
"""

import argparse
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.schedules import build

ROOT = Path(__file__).parents[1]
FOLD3D = Path(sys.executable).with_name("fold3d")
RANKS, PIPELINE, SEGMENTS, MICROBATCHES = 4, 2, 2, 8
REPLICAS = RANKS // PIPELINE
CORPUS_BYTES = 8_000_000

MODEL = f"""
    --num-layers 8 --hidden-size 128 --num-attention-heads 4
    --seq-length 128 --max-position-embeddings 128 --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 2 --global-batch-size {2 * MICROBATCHES * REPLICAS}
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --clip-grad 1.0 --weight-decay 0.01
    --split 100,0,0 --eval-iters 0 --eval-interval 1000 --log-interval 1
    --pipeline-model-parallel-size {PIPELINE} --segments {SEGMENTS} --overlap-grad-reduce
"""
ITERATION = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+).* lm loss: ([\d.E+-]+)")


@dataclass(frozen=True, slots=True)
class Run:
    """One training run and what to call it."""

    schedule: str  # on the command line
    order: str  # the plan that it follows
    title: str


RUNS = (
    Run("stock", "interleaved", "Stock Megatron, interleaved 1F1B"),
    Run("aiao", "aiao", "FOLD3D, all-in-all-out"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=20, metavar="N")
    parser.add_argument("--output", type=Path, default=ROOT / "out/demo", metavar="DIR")
    options = parser.parse_args(argv)
    if options.iterations < 1:
        parser.error(f"--iterations {options.iterations}: train at least one")
    options.output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()

    corpus = prepare_corpus(options.output / "stdlib")
    losses, times_ms = {}, {}
    for run in RUNS:
        print(f"\n{run.title} (--schedule {run.schedule}). A line per pipeline rank, in order:")
        for rank, program in enumerate(plan_of(run).to_text().splitlines()):
            print(f"  rank {rank}: {program}")
        rows = list(train(run, corpus, options.iterations, options.output / run.schedule))
        losses[run.title] = [loss for _, loss in rows]
        times_ms[run.title] = median(ms for ms, _ in rows)

    identical = report(losses, times_ms)
    show_traces([options.output / run.schedule for run in RUNS])
    print(f"Done in {time.monotonic() - started:.0f} s.")
    return 0 if identical else 1


def plan_of(run: Run) -> Plan:
    """Return the order in which the run computes."""
    return build(
        run.order, num_ranks=PIPELINE, num_segments=SEGMENTS, num_microbatches=MICROBATCHES
    )


def prepare_corpus(prefix: Path) -> list[str]:
    """Tokenize the standard library's source, once; return the flags that name the result."""
    if not prefix.with_suffix(".idx").exists():
        print("Corpus: the source of Python's standard library, byte by byte")
        command = [sys.executable, str(ROOT / "scripts/prepare_data.py"), "--stdlib"]
        command += ["--append-eod", "--max-bytes", str(CORPUS_BYTES)]
        subprocess.run([*command, "--output-prefix", str(prefix)], check=True)
    # What prepare_data.py says of bytes and an end-of-document mark: the tokens are numbers now.
    return ["--data-path", str(prefix), "--tokenizer-type", "NullTokenizer", "--vocab-size", "257"]


def train(
    run: Run, corpus: Sequence[str], iterations: int, output: Path
) -> Iterator[tuple[float, str]]:
    """Train, print and yield each iteration's milliseconds and loss.

    Raises:
        SystemExit: training failed; its last lines are in the message.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), str(ROOT / "pretrain_gpt.py"), "--device", "cpu"]
    command += ["--schedule", run.schedule, *MODEL.split(), *corpus]
    command += ["--train-iters", str(iterations), "--lr-decay-iters", str(iterations)]
    command += ["--data-cache-path", str(output.parent / "cache"), "--trace", str(output)]
    print(f"Starting {RANKS} ranks; the first iteration comes after some 20 s.", flush=True)
    tail: deque[str] = deque(maxlen=30)
    done = 0
    with (
        output.with_suffix(".log").open("w") as log,
        subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as ranks,
    ):
        assert ranks.stdout is not None
        for line in ranks.stdout:
            log.write(line)
            tail.append(line)
            if found := ITERATION.search(line):
                done += 1
                ms, loss = float(found[1]), found[2]
                print(f"  iteration {done:>3}   loss {loss}   {ms:>7.1f} ms", flush=True)
                yield ms, loss
    if ranks.returncode or done < iterations:
        raise SystemExit(f"{''.join(tail)}\n{run.title} ended after {done} iterations: {log.name}")


def show_traces(folders: Sequence[Path]) -> None:
    """Print where the time of two traced iterations went, and draw them."""
    if not all(any(folder.glob("rank-*.json")) for folder in folders):
        return  # a run this short records nothing
    for folder in folders:
        print(flush=True)
        subprocess.run([FOLD3D, "trace", folder], check=True)
    picture = folders[0].parent / "timelines.svg"
    command: list[str | Path] = [FOLD3D, "compare", *folders, "--timelines", picture]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    print(f"\nBoth pipelines on one time axis: {picture}")


def report(losses: dict[str, list[str]], times_ms: dict[str, float]) -> bool:
    """Print the comparison; returns whether the losses are identical."""
    first, second = losses
    width = max(map(len, losses))
    print(f"\n{'iteration':>9}   {first:>{width}}   {second:>{width}}")
    pairs = list(zip(losses[first], losses[second], strict=True))
    for iteration, (a, b) in enumerate(pairs, start=1):
        mark = "" if a == b else "   DIFFERS"
        print(f"{iteration:>9}   {a:>{width}}   {b:>{width}}{mark}")
    print(f"{'median ms':>9}   {times_ms[first]:>{width}.1f}   {times_ms[second]:>{width}.1f}")
    same = sum(a == b for a, b in pairs)
    print(f"\nLosses identical in every digit: {same} of {len(pairs)} iterations.")
    print("The times compare nothing yet: ranks on one machine have no slow network to hide.")
    return same == len(pairs)


if __name__ == "__main__":
    sys.exit(main())

"""Train with a random fault every now and then, restart, and end where an undisturbed run ends.

    python -m tests.stress.soak --folder out/soak --iterations 3000 --seed 1

A fault kills a rank, asks it to end, kills it while it writes a checkpoint, or stops it for a
while. The job then starts again from its last complete checkpoint. With ``--minutes`` the script
leaves after that time; started again with the same folder it goes on.
"""

import argparse
import json
import os
import random
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.distributed import RankError, run_distributed
from tests.end_to_end.training import Record, differences, train
from tests.stress.flag_sets import MODEL

NUM_RANKS = 2
RUN = (
    f"{MODEL} --num-layers 4 --micro-batch-size 1 --global-batch-size 2 --eval-iters 0 "
    "--eval-interval 1000 --pipeline-model-parallel-size 2 --segments 2 --bf16 "
    "--overlap-grad-reduce --log-interval 100 --distributed-timeout-minutes 1"
)
OURS = "--schedule aiao:step=next:share=0.5 --preemptive-comm"
FAULTS = ("SIGKILL", "SIGTERM", "killed while saving", "stopped for 3 s")
LAST = 5  # iterations whose losses are compared as well
TRACKER = "latest_checkpointed_iteration.txt"


def main() -> int:
    """Soak; returns 1 if the disturbed run ended elsewhere, 2 if it has not ended yet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("out/soak"))
    parser.add_argument("--iterations", type=int, default=3000)
    parser.add_argument("--save-interval", type=int, default=50)
    parser.add_argument("--seconds-between-faults", type=float, default=20.0)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + 60 * options.minutes
    run = f"{RUN} --train-iters {options.iterations} --lr-decay-iters {2 * options.iterations}"

    whole = options.folder / "undisturbed.json"
    if not whole.exists():
        began_s = time.monotonic()
        records = run_distributed(_train, NUM_RANKS, run, "", timeout_s=36000)
        whole.write_text(json.dumps([asdict(record) for record in records]))
        _note(options.folder, event="undisturbed", seconds=time.monotonic() - began_s)
    expected = [Record(**record) for record in json.loads(whole.read_text())]

    saved, ranks = options.folder / "saved", options.folder / "ranks"
    ranks.mkdir(exist_ok=True)
    resumed = f"{run} --save {saved} --load {saved} --save-interval {options.save_interval}"
    while time.monotonic() < until_s:
        began = _saved_iteration(saved)
        dice = random.Random(f"{options.seed}/{_count(options.folder)}")
        try:
            with _faults(dice, options, ranks, saved, until_s) as met:
                records = run_distributed(_train, NUM_RANKS, resumed, str(ranks), timeout_s=36000)
        except RankError as error:
            _note(
                options.folder,
                event="restart",
                faults=met,
                first=began,
                saved=_saved_iteration(saved),
                said=str(error).partition("\n\nThe last it")[0].splitlines()[-1],
            )
            if not met:
                print(f"it failed without a fault: {error}")
                return 1
            continue
        _note(options.folder, event="end", faults=met, first=began, saved=options.iterations)
        found = differences([_end(r) for r in records], [_end(r) for r in expected])
        print(f"{_told(options.folder)}: {found or 'equal'}")
        return int(bool(found))
    print(f"{_told(options.folder)}: at iteration {_saved_iteration(saved)}, not over yet")
    return 2


def _train(run: str, folder: str) -> Record:
    if folder:
        Path(folder, os.environ["RANK"]).write_text(f"{os.getpid()}")
    record = train(shlex.split(f"{run} {OURS}"))
    del record.iterations[:-LAST]
    return record


def _end(record: Record) -> Record:
    """Return what two runs have in common of which one began later."""
    return Record(
        record.iterations[-1:], [], [], record.parameters, record.layers, record.optimizer
    )


@contextmanager
def _faults(
    dice: random.Random, options: argparse.Namespace, ranks: Path, saved: Path, until_s: float
) -> Iterator[list[str]]:
    """Meet the ranks with faults until the block ends; yields their names as they happen."""
    over, met = threading.Event(), list[str]()
    for file in ranks.iterdir():
        file.unlink()

    def meet() -> None:
        while True:
            after_s = dice.expovariate(1 / options.seconds_between_faults)
            fault, rank = dice.choice(FAULTS), dice.randrange(NUM_RANKS)
            left_s = until_s - time.monotonic()
            if over.wait(min(after_s, max(left_s, 0))):
                return
            if left_s < after_s:
                fault = "SIGTERM"  # the script's time is up
            with suppress(FileNotFoundError, ProcessLookupError):  # not yet, or not any more
                pid = int((ranks / str(rank)).read_text())
                if fault == "killed while saving" and not _wait_for_save(saved, over):
                    return
                met.append(f"rank {rank}: {fault}")
                if fault == "stopped for 3 s":
                    os.kill(pid, signal.SIGSTOP)
                    over.wait(3.0)
                    os.kill(pid, signal.SIGCONT)
                else:
                    os.kill(pid, signal.SIGTERM if fault == "SIGTERM" else signal.SIGKILL)
                    over.wait()
                    return

    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    try:
        yield met
    finally:
        over.set()
        thread.join()


def _wait_for_save(saved: Path, over: threading.Event) -> bool:
    """Wait until a checkpoint has begun that is not complete; False if the job ends before."""
    while not over.wait(0.0005):
        newest = max((int(path.name[5:]) for path in saved.glob("iter_*")), default=0)
        if newest > _saved_iteration(saved):
            return True
    return False


def _saved_iteration(saved: Path) -> int:
    with suppress(FileNotFoundError, ValueError):
        return int((saved / TRACKER).read_text())
    return 0


def _note(folder: Path, **event: Any) -> None:
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"at": datetime.now(UTC).isoformat(), **event}) + "\n")


def _events(folder: Path) -> list[dict[str, Any]]:
    file = folder / "events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _count(folder: Path) -> int:
    return len(_events(folder))


def _told(folder: Path) -> str:
    faults: Sequence[str] = [
        fault.partition(": ")[2] for event in _events(folder) for fault in event.get("faults", ())
    ]
    starts = sum(event["event"] in ("restart", "end") for event in _events(folder))
    return f"{len(faults)} faults {dict(Counter(faults))}, {starts} starts"


if __name__ == "__main__":
    sys.exit(main())

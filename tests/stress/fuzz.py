"""Train runs that `flag_sets` draws, stock's and ours, and compare them bit for bit.

    python -m tests.stress.fuzz --minutes 60 --seed 7 --log fuzz.jsonl

Each line of the log is one comparison. A run that differs, fails or hangs is made smaller, setting
by setting, as long as it goes on doing so; what is left is a row for tests/end_to_end.
"""

import argparse
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from megatron.fold3d.policy.predicted import Predicted
from tests.distributed import RankError, run_distributed
from tests.end_to_end.training import Record, as_known, differences, since, train, watch
from tests.stress.flag_sets import (
    FlagSet,
    add_own_arguments,
    draw,
    random_plan,
    refusal,
    refusal_of,
)
from tests.stress.program import append, options, until

VARIANTS = 6  # of ours for one run of stock
SAVED = 2  # the iteration after which a checkpoint is taken
TIMEOUT_S = 100.0
EQUAL, DIFFERENT, FAILED = "equal", "different", "failed"
REFUSED, STOCK_REFUSED, STOCK_FAILED = "refused", "refused by stock", "failed in stock"
FINDINGS = (DIFFERENT, FAILED)


class RefusedError(Exception):
    """A run ended before it made a process group: that is one clear message, not a failure."""


@dataclass(frozen=True, slots=True)
class Result:
    """How one comparison ended, and why if it is not `EQUAL`."""

    flags: FlagSet
    outcome: str
    why: str = ""


def compare(variants: Sequence[FlagSet]) -> Iterator[Result]:
    """Train stock's run, and each run of ours that is to be equal to it."""
    stock: dict[tuple[str, ...], list[Record] | RankError] = {}
    for flags in variants:
        argv = flags.stock()
        if argv not in stock:
            try:
                stock[argv] = _trained(flags.num_ranks, argv)
            except RankError as error:
                stock[argv] = error
        expected = stock[argv]
        if isinstance(expected, RankError):
            outcome = STOCK_REFUSED if "RefusedError" in str(expected) else STOCK_FAILED
            yield Result(flags, outcome, _traceback(expected))
            continue
        try:
            found = _found(flags, expected)
            outcome, why = DIFFERENT if found else EQUAL, "\n".join(found[:20])
        except RankError as error:
            outcome = REFUSED if "RefusedError" in str(error) else FAILED
            why = _traceback(error)
        if outcome in FINDINGS and flags.setting("checkpoint") and _stock_fails(flags):
            outcome = STOCK_FAILED
        yield Result(flags, outcome, why)


def _found(flags: FlagSet, stock: Sequence[Record]) -> list[str]:
    """Return what differs from stock's run, in ours and in one that goes on from its checkpoint."""
    with TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        (folder / "plan").write_text(random_plan(flags))
        also = f"{flags.saving(name)} {flags.setting('checkpoint format')}".split()
        commands = {
            run: [word.replace("PLAN", f"{folder}/plan").replace("FOLDER", name) for word in words]
            for run, words in (
                ("ours", flags.ours()),
                ("aiao", flags.aiao()),
                ("stock", (*flags.stock(), *also)),
            )
        }
        if not flags.setting("checkpoint"):
            return _differences(_trained(flags.num_ranks, commands["ours"]), stock)
        saves, resumes = flags.setting("checkpoint").split(", ")
        whole = _trained(flags.num_ranks, commands[saves])
        (folder / "saved/latest_checkpointed_iteration.txt").write_text(f"{SAVED}")
        resumed = _trained(flags.num_ranks, [*commands[resumes], "--load", f"{name}/saved"])
        skipped = len(stock[0].evaluations) - len(resumed[0].evaluations)
        rest = since(SAVED, stock, skipped)
        return [*_differences(whole, stock), *_differences(resumed, rest)]


def _stock_fails(flags: FlagSet) -> bool:
    """Tell whether stock fails in the same way, or differs, with a checkpoint of its own."""
    settings = {**flags.settings, "checkpoint": "stock, stock"}
    try:
        stock = _trained(flags.num_ranks, flags.stock())
        return bool(_found(replace(flags, settings=settings), stock))
    except RankError:
        return True


def _differences(ours: Sequence[Record], stock: Sequence[Record]) -> list[str]:
    """Compare all that ours knew: a norm whose sum ends in the next iteration is logged later."""
    for mine, record in zip(ours, stock, strict=True):
        if len(mine.iterations) != len(record.iterations):
            return [f"{len(mine.iterations)} iterations instead of {len(record.iterations)}"]
    return differences(ours, as_known(ours, stock))


def _trained(num_ranks: int, argv: Sequence[str]) -> list[Record]:
    records: list[Record] = run_distributed(
        train_or_refuse, num_ranks, tuple(argv), timeout_s=TIMEOUT_S
    )
    return records


def train_or_refuse(argv: Sequence[str]) -> Record:
    """Train on this rank, with some parameters frozen and some choices tried if ``argv`` says so.

    Raises:
        RefusedError: the run ended before any process group existed.
    """
    import torch.distributed as dist

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_own_arguments(parser)
    own, argv = parser.parse_known_args(argv)
    os.environ["NCCL_ALGO"] = "Ring"  # Megatron's --deterministic-mode demands it
    if own.frozen:
        _freeze(own.frozen)
    if own.tried:
        _try(random.Random(own.tried))
    try:
        return train(argv)
    except Exception as error:
        if dist.is_initialized():
            raise
        raise RefusedError(f"{type(error).__name__}: {error}") from error


def _freeze(pattern: str) -> None:
    from megatron.core.models.gpt import GPTModel

    def freeze(_: None, model: GPTModel, *__: Any, **___: Any) -> None:
        for name, parameter in model.named_parameters():
            if re.search(pattern, f"{model.vp_stage or 0}.{name}"):
                parameter.requires_grad = False

    watch(GPTModel, "__init__", after=freeze)


def _try(dice: random.Random) -> None:
    """Let ``auto`` try any two of the choices that it has predicted, not the fastest."""
    from megatron.fold3d.predict.search.descent import Descent

    def to_try(self: Descent) -> list[Predicted]:
        self.run()
        found = [one for one in self.found.values() if one and one.choice != self.space.first]
        return dice.sample(found, min(2, len(found)))

    Descent.to_try = to_try  # type: ignore[method-assign]


def _traceback(error: RankError) -> str:
    """Return what failed, without what the rank had printed before."""
    return str(error).partition("\n\nThe last it printed:")[0]


def shrink(result: Result) -> Result:
    """Return the smallest comparison that ends as this one does, found by leaving out settings."""
    smallest, tried = result, True
    while tried:
        tried = False
        for candidate in _smaller(smallest.flags):
            if refusal(candidate.stock(), candidate.num_ranks) or refusal_of(candidate):
                continue
            (found,) = compare([candidate])
            if found.outcome == result.outcome:
                smallest, tried = found, True
                break
    return smallest


def _smaller(flags: FlagSet) -> list[FlagSet]:
    without = [flags.without([name]) for name in flags.settings]
    sizes = ({"tp": 1}, {"dp": 1}, {"segments": 1, "one_group": False}, {"m": 2}, {"iterations": 2})
    changed: list[dict[str, Any]] = [
        size for size in sizes if any(getattr(flags, name) > value for name, value in size.items())
    ]
    if flags.setting("checkpoint"):
        changed = [size for size in changed if "iterations" not in size]
    return [*without, *(replace(flags, **size) for size in changed)]


def described(result: Result) -> dict[str, Any]:
    """Return a result as one line of the log holds it."""
    flags = asdict(result.flags)
    return {"outcome": result.outcome, **flags, "why": result.why[-3000:]}


def main() -> int:
    """Fuzz for some minutes; returns 1 if a run of ours differed or failed."""
    parser = options(__doc__, "fuzz.jsonl")
    parser.add_argument("--draws", type=int, default=1 << 30)
    parser.add_argument("--having", default="", help="a setting of ours that each run has")
    parser.add_argument("--no-shrink", action="store_true")
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    number = args.first - 1
    end_s = time.monotonic() + 60 * args.minutes
    for number in until(end_s, range(args.first, args.first + args.draws)):
        variants, refused = draw(f"{args.seed}/{number}", VARIANTS, args.having)
        counts["refused before it was run"] += len(refused)
        for result in compare(variants):
            counts[result.outcome] += 1
            append(args.log, seed=args.seed, draw=number, **described(result))
            if result.outcome in FINDINGS:
                smallest = result if args.no_shrink else shrink(result)
                print(f"draw {number}: {json.dumps(described(smallest), indent=1)}", flush=True)
    print(f"seed {args.seed}, draws {args.first} to {number}:", *counts.items())
    return int(any(counts[outcome] for outcome in FINDINGS))


if __name__ == "__main__":
    sys.exit(main())

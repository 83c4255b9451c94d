"""``fold3d search``: choose schedule, sizes and segments for a model on a cluster."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from megatron.fold3d.analysis.choices import WORTHWHILE, Choice
from megatron.fold3d.analysis.choices import Search as Found
from megatron.fold3d.analysis.model import ModelShape, model_shape
from megatron.fold3d.analysis.planner import search
from megatron.fold3d.commands.as_built import AsBuilt, lacking
from megatron.fold3d.commands.console import OK, REJECTED, Progress, complain, write
from megatron.fold3d.commands.hardware_options import add_hardware_options, named_cluster
from megatron.fold3d.commands.training_flags import check_trains, training_flags

DESCRIPTION = """\
Choose the schedule, the (dp, pp, tp) sizes, the micro-batch size, the segments
and the recomputation of a model on a cluster: the fastest that fit into memory,
and the best of stock Megatron beside them. Predicted is what training does
today; --whole-paper adds what it does not do yet."""

EXAMPLES = """\
examples:
  fold3d search --model gpt3-18b --cluster a100x128-200g --global-batch-size 256
  fold3d search --model gpt3-39b --cluster my-cluster.toml --global-batch-size 256 --json
  fold3d search --model 24-2048-16 --cluster h100x8 --global-batch-size 64 --emit

A cluster file has one `field = number` per line: num_nodes, gpus_per_node,
gpu_flops_per_s, gpu_memory_bytes, nic_bytes_per_s, intra_bytes_per_s,
host_copy_bytes_per_s and host_memory_bytes."""

# Of those that are fastest with the whole paper, how many are judged as training runs them.
_JUDGED = 30


@dataclass(frozen=True, slots=True)
class _Row:
    """A choice and what it is called; stock's twin of AIAO is AIAO's order in stock Megatron."""

    choice: Choice
    is_twin: bool = False
    lacks: tuple[str, ...] = ()

    @property
    def is_stock(self) -> bool:
        return self.is_twin or self.choice.candidate.is_stock

    @property
    def name(self) -> str:
        if self.is_twin:
            return "breadth-first"
        return self.choice.candidate.schedule + "+offload" * self.choice.candidate.offload

    def flags(self, shape: ModelShape) -> str:
        """Return the flags of ``pretrain_gpt.py``.

        Raises:
            ValueError: it does not train such a model.
        """
        check_trains(shape)
        return training_flags(shape, self.choice.candidate, one_group=self.is_twin)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The rows to show, fastest first, and the best of stock Megatron."""

    rows: list[_Row]
    stock: _Row | None
    found: Found

    @property
    def aiao(self) -> _Row | None:
        return next((row for row in self.rows if not row.is_stock), None)

    @property
    def gain(self) -> float:
        """By how much the best AIAO is faster than the best of stock."""
        if self.stock is None or self.aiao is None:
            return 0.0
        return self.stock.choice.iteration_s / self.aiao.choice.iteration_s - 1

    @property
    def possible_gain(self) -> float:
        """By how much the whole paper would be faster than the best of stock."""
        ours = (c.iteration_s for c in self.found.best if not c.candidate.is_stock)
        fastest_s = min(ours, default=None)
        if self.stock is None or fastest_s is None:
            return 0.0
        return self.stock.choice.iteration_s / fastest_s - 1

    @property
    def best(self) -> _Row:
        if self.stock is None or (self.aiao is not None and self.gain >= WORTHWHILE):
            return self.aiao or self.rows[0]
        return self.stock


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this command."""
    add_hardware_options(parser, required=True)
    parser.add_argument(
        "--global-batch-size", required=True, type=int, metavar="N", help="sequences per iteration"
    )
    parser.add_argument("--top", type=int, default=10, metavar="N", help="rows (default: 10)")
    parser.add_argument(
        "--whole-paper",
        action="store_true",
        help="give AIAO what training does not do yet: DP.sync that reaches into the next "
        "iteration, PP.sync that goes before it, offload",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the rows as one JSON object")
    form.add_argument(
        "--emit", action="store_true", help="nothing but the best one's flags of pretrain_gpt.py"
    )


def run(args: Namespace) -> int:
    """Print the choices; returns the exit code."""
    if args.top < 1:
        raise ValueError(f"--top {args.top}: show at least one")
    shape, cluster = model_shape(args.model), named_cluster(args)
    if args.emit:
        check_trains(shape)
    with Progress("simulated") as progress:
        found = search(
            shape,
            cluster,
            global_batch_size=args.global_batch_size,
            top=max(_JUDGED, args.top),
            progress=progress,
        )
    answer = _answer(found, AsBuilt(shape, cluster), args.top, whole_paper=args.whole_paper)
    if not answer.rows:
        complain(
            f"{shape.name} fits on {cluster.name} only with what training does not have yet; "
            "--whole-paper shows it, more GPUs do without"
        )
        return REJECTED
    best = answer.best
    if args.json:
        write(json.dumps(_as_json(answer, shape)) + "\n")
    elif not args.emit:
        write("\n".join(_lines(answer, shape)) + "\n")
    elif best.lacks:
        complain(
            f"the best needs {', '.join(best.lacks)}, which training does not have yet; "
            "drop --whole-paper for the best that runs"
        )
        return REJECTED
    else:
        write(best.flags(shape) + "\n")
    return OK


def _answer(found: Found, judge: AsBuilt, top: int, *, whole_paper: bool) -> _Answer:
    """Judge the planner's choices, and let stock Megatron run AIAO's order as well."""
    orders = [choice.candidate for choice in found.best if not choice.candidate.is_stock]
    stock = [_Row(c) for c in (*found.best, found.best_stock) if c and c.candidate.is_stock]
    stock += [_Row(twin, is_twin=True) for c in orders if (twin := judge.stock_twin(c))]
    if whole_paper:
        ours = [
            _Row(choice, lacks=lacking(choice.candidate, deferred=True))
            for choice in found.best
            if not choice.candidate.is_stock
        ]
    else:
        ours = [_Row(choice) for c in orders if (choice := judge.aiao(c))]
    stock = _fastest(stock, judge)
    rows = _fastest(ours + stock, judge)
    return _Answer(rows[:top], stock[0] if stock else None, found)


def _fastest(rows: list[_Row], judge: AsBuilt) -> list[_Row]:
    """Return the rows that fit, fastest first, each once."""
    unique = {(row.choice.candidate, row.is_twin): row for row in rows}.values()
    fitting = [row for row in unique if row.choice.device_bytes <= judge.usable_bytes]
    return sorted(fitting, key=lambda row: row.choice.iteration_s)


def _lines(answer: _Answer, shape: ModelShape) -> Iterator[str]:
    yield (
        f"{'schedule':<13} {'dp':>4} {'pp':>3} {'tp':>3} {'seg':>3} {'mbs':>3}  {'recompute':<9} "
        f"{'iteration':>10} {'memory':>9} {'bubble':>7} {'DP.sync':>7} {'PP.sync':>7}  limited by"
    )
    yield from map(_line, answer.rows)
    if answer.stock and answer.stock not in answer.rows:
        yield "best of stock Megatron:"
        yield _line(answer.stock)
    found, best = answer.found, answer.best
    yield f"{found.considered} considered, {found.too_large} too large for a GPU's memory"
    if best.is_stock:
        yield "AIAO gains nothing here, use these stock flags:"
    elif answer.stock is None:
        yield "No stock configuration fits; AIAO:"
    else:
        yield f"AIAO is {answer.gain:.1%} faster than the best of stock Megatron:"
    if best.lacks:
        yield f"(training does not have yet: {', '.join(best.lacks)})"
        return
    try:
        yield best.flags(shape)
    except ValueError as error:
        yield f"({error})"
    if best.is_stock and answer.possible_gain >= WORTHWHILE:
        gain = f"{answer.possible_gain:.1%} faster than that"
        yield f"With all of the paper AIAO would be {gain}: --whole-paper"


def _line(row: _Row) -> str:
    choice, candidate, spent = row.choice, row.choice.candidate, row.choice.exposed
    setup = candidate.setup
    shares = (spent.share(s) for s in (spent.bubble_s, spent.grad_sync_s, spent.p2p_s))
    return (
        f"{row.name:<13} {setup.data_parallel:>4} {candidate.num_ranks:>3} "
        f"{setup.tensor_parallel:>3} {candidate.num_segments:>3} {setup.microbatch_size:>3}  "
        f"{setup.recompute:<9} {choice.iteration_s:>9.3f}s {choice.device_bytes / 2**30:>5.1f} GiB "
        + " ".join(f"{share:>7.1%}" for share in shares)
        + f"  {choice.limit}"
    )


def _as_json(answer: _Answer, shape: ModelShape) -> dict[str, Any]:
    def row(of: _Row) -> dict[str, Any]:
        c, setup = of.choice.candidate, of.choice.candidate.setup
        return {
            "schedule": of.name,
            "stock": of.is_stock,
            "dp": setup.data_parallel,
            "pp": c.num_ranks,
            "tp": setup.tensor_parallel,
            "segments": c.num_segments,
            "microbatches": c.num_microbatches,
            "micro_batch_size": setup.microbatch_size,
            "recompute": setup.recompute,
            "iteration_s": of.choice.iteration_s,
            "device_bytes": of.choice.device_bytes,
            "exposure": asdict(of.choice.exposed),
            "limited_by": of.choice.limit,
            "lacks": of.lacks,
        }

    best = answer.best
    try:
        flags = None if best.lacks else best.flags(shape)
    except ValueError:
        flags = None
    return {
        "rows": list(map(row, answer.rows)),
        "best_stock": answer.stock and row(answer.stock),
        "best": row(best),
        "aiao_gain": answer.gain,
        "flags": flags,
        "considered": answer.found.considered,
        "too_large": answer.found.too_large,
    }

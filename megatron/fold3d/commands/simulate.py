"""``fold3d simulate``: predict how long a training takes and where its time goes."""

import json
import shlex
from argparse import ArgumentError, ArgumentParser, Namespace
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from megatron.fold3d.commands import auto_tries
from megatron.fold3d.commands.console import OK, REJECTED, complain, write
from megatron.fold3d.commands.cost_sources import (
    add_cluster_options,
    add_number_options,
    in_numbers,
    named_cluster,
    on_cluster,
    on_queues,
)
from megatron.fold3d.commands.job import config_of, default_queues, left_out, run_of
from megatron.fold3d.commands.megatron_flags import Described, add_training_flags, given_training
from megatron.fold3d.commands.plan_sizes import in_words
from megatron.fold3d.commands.simulate_report import (
    Report,
    judge_memory,
    page_of,
    title_of,
    views_of,
)
from megatron.fold3d.commands.timeline_picture import draw
from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.config.schedule_flags import word_of
from megatron.fold3d.plan.device_queues import CONNECTIONS
from megatron.fold3d.plan.files import read_plan
from megatron.fold3d.plan.ir import PlanError
from megatron.fold3d.plan.schedule_word import AUTO
from megatron.fold3d.plan.verify import verify
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.search.planner import strongest_stock
from megatron.fold3d.predict.search.settled import PredictedRun

EXAMPLE = "fold3d simulate --schedule aiao --pp 2 --segments 2 --microbatches 4"

_MOST_LAUNCHES = 10_000


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--svg", type=Path, help="write the diagram here")
    parser.add_argument(
        "--html",
        type=Path,
        help="write a page for the browser: the diagram to zoom into, and where the time goes",
    )
    parser.add_argument(
        "--beside",
        action="append",
        default=[],
        metavar="FLAGS",
        help="with --svg or --html: also show the run with these flags, added or changed, "
        "such as '--schedule 1f1b --segments 1'; may be given several times",
    )
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    parser.add_argument(
        "--cuda-connections",
        type=int,
        choices=CONNECTIONS,
        metavar="N",
        help="on GPUs with CUDA_DEVICE_MAX_CONNECTIONS=N: 1, 8 or 32 hardware queues that all "
        "streams share (default: a queue for each, and launches hold up nothing)",
    )
    parser.add_argument(
        "--grad-sync-launches",
        type=int,
        help="with --cuda-connections: collectives that DP.sync of a model chunk is launched as "
        "(default: 1; of a model, as training cuts it)",
    )
    sources = parser.add_mutually_exclusive_group()
    add_number_options(sources)
    add_cluster_options(parser, sources)
    add_training_flags(parser)


class _Asked(NamedTuple):
    """A run that was asked for, before anything is simulated."""

    said: Described
    hardware: Cluster | None
    config: Fold3DConfig
    run: PredictedRun


def run(args: Namespace) -> int:
    """Print what is predicted; returns the exit code."""
    _check_options(args)
    asked = _asked(args, given_training(args))
    try:
        _check_plan(asked.config)
    except PlanError as error:
        complain(f"{asked.config.plan_file}: {error}")
        return REJECTED
    if asked.config.choice.order == AUTO:
        write(_auto_answer(args, asked))
        return OK
    report = _report(asked)
    reports = [report, *(_beside(args, flags, report) for flags in args.beside)]
    if args.svg:
        args.svg.write_bytes(draw("--svg", title_of(reports), views_of(reports)))
    if args.html:
        args.html.write_text(page_of(reports), encoding="utf-8")
    write(json.dumps(report.as_json()) + "\n" if args.json else "\n".join(report.lines()) + "\n")
    return judge_memory(report)


def _asked(args: Namespace, said: Described) -> _Asked:
    """Return the run that flags describe, with the costs that the options say."""
    hardware = None if args.cluster is None else named_cluster(args, said.model())
    if said.shape is not None and not any((args.cluster, args.costs, args.seconds)):
        raise ValueError(
            "a model without --cluster: what it takes depends on the GPUs; give --cluster NAME, or "
            "times with --seconds or --costs"
        )
    connections = args.cuda_connections
    said.args.cuda_device_max_connections = str(connections or default_queues(said.args, hardware))
    config = config_of(said, hardware)
    if args.grad_sync_launches is not None and word_of(said.args).value("slices") is None:
        whole = replace(config.choice, slices=None)  # the option says how sums are cut
        config = replace(config, job=replace(config.job, choice=whole))
    costs = in_numbers(args) if hardware is None else on_cluster(said.model(), hardware)
    shape = said.shape if hardware else None
    costs = on_queues(costs, args.cuda_connections, args.grad_sync_launches)
    its = run_of(said.args, config, costs, shape, hardware)
    _check_costs(its, said)
    return _Asked(said, hardware, config, its)


def _check_plan(config: Fold3DConfig) -> None:
    """Prove that the user's plan can run; a generated schedule is known to."""
    if config.plan_file is not None:
        verify(read_plan(config.plan_file))


def _report(asked: _Asked) -> Report:
    """Settle what is open in a run, and simulate it."""
    said, its = asked.said, asked.run
    its = its.settled()
    found = its.simulated()
    return Report(
        name=_name(its, asked.config, said),
        run=its,
        found=found,
        peaks=its.peaks(found),
        cluster=asked.hardware,
        left_out=tuple(left_out(said.args)),
        layers=its.candidate.layers if said.args.layers is not None else None,
    )


def _beside(args: Namespace, flags: str, first: Report) -> Report:
    """Simulate the run with other flags, which add to the first one's or replace them.

    Raises:
        ValueError: it cannot be simulated, or shown beside the first.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_arguments(parser)
    typed, words = args.words
    try:
        other, others_typed = parser.parse_known_args(shlex.split(flags), copy(args))
        other.words = (*typed, *others_typed), words
        _check_options(other)
        asked = _asked(other, given_training(other))
        _check_plan(asked.config)
        if asked.config.choice.order == AUTO:
            raise ValueError("--schedule auto is several schedules; name one")
        if (ranks := asked.config.num_ranks) != (shown := first.found.plan.num_ranks):
            raise ValueError(f"--pp {ranks} beside {shown} ranks: a picture has one number of them")
        return _report(asked)
    except (ValueError, ArgumentError) as error:
        raise ValueError(f"--beside {flags!r}: {error}") from None


def _check_options(args: Namespace) -> None:
    """Refuse options that contradict one another.

    Raises:
        ValueError: found, rule and fix.
    """
    if args.beside and not (args.svg or args.html):
        raise ValueError(
            f"--beside {args.beside[0]!r} shows several runs in a picture; give --html FILE or "
            "--svg FILE, or drop it"
        )
    if (launches := args.grad_sync_launches) is None:
        return
    if args.cuda_connections is None or not 1 <= launches <= _MOST_LAUNCHES:
        raise ValueError(
            f"--grad-sync-launches {launches}: it is 1 to {_MOST_LAUNCHES} collectives of a model "
            "chunk's DP.sync, which hold up others in shared queues; give --cuda-connections 1 too"
        )


def _check_costs(its: PredictedRun, said: Described) -> None:
    """Refuse options whose costs are not known.

    Raises:
        ValueError: found, rule and fix.
    """
    known, c = its.known.costs, its.candidate
    early = c.choice.where(recompute="early")
    if early and its.shape is None and not any(known.recompute_s):
        raise ValueError(
            "recompute=early: costs have no recomputation: give recompute and backward in "
            "--seconds, a model on a cluster, or recompute_s in --costs"
        )
    if c.choice.pairs and not any(known.tp_sync_s + known.ep_sync_s):
        raise ValueError(
            "pairs=on: there is no collective of a layer in the costs: give tp in --seconds, a "
            "model on a cluster, or tp_sync_s or ep_sync_s in --costs"
        )
    if c.combined and not any(known.ep_sync_s):
        raise ValueError(
            "--overlap-moe-expert-parallel-comm: there is no all-to-all of experts in the costs: "
            "give --expert-model-parallel-size above 1, a model with experts and a cluster, or "
            "ep_sync_s in --costs"
        )
    if c.preemptive and its.known.cuda_connections == 1:
        raise ValueError(
            "--preemptive-comm with --cuda-connections 1: in one queue nothing overtakes what was "
            "launched before; give 8 or 32, or drop --preemptive-comm"
        )
    if c.choice.slices and its.known.launches:
        raise ValueError(
            f"slices=on with --grad-sync-launches {its.known.launches[0]}: a slice is one "
            "collective; drop one"
        )
    if its.shape is not None:
        return
    for flag, is_given in (
        ("--recompute-layers", c.recompute_layers or its.auto_recompute_layers),
        ("--layers", said.args.layers is not None),
    ):
        if is_given:
            raise ValueError(f"{flag}: it is for the layers of a model; give a model and --cluster")


def _auto_answer(args: Namespace, asked: _Asked) -> str:
    """Return what ``--schedule auto`` would try in training with these costs, as text or JSON."""
    if given := [f"--{name}" for name in ("svg", "html") if getattr(args, name)]:
        raise ValueError(
            f"{given[0]} with --schedule auto: it says which settings training would try; drop it, "
            "or name a schedule"
        )
    its, hardware = asked.run, asked.hardware
    stock, *tried = auto_tries.tries(its, asked.config)
    alike = None
    if its.shape is not None and hardware is not None:
        alike = strongest_stock(its.shape, hardware, its.candidate)
    if args.json:
        row, *rows = (
            {"schedule": str(one.choice), "seconds": one.seconds} for one in (stock, *tried)
        )
        best = alike and {"schedule": alike.candidate.name, "seconds": alike.iteration_s}
        return json.dumps({"same_layout": best, "stock": row, "tries": rows}) + "\n"
    c = its.candidate
    sizes = in_words(c.num_ranks, c.num_segments, c.num_microbatches)
    return "\n".join([f"auto: {sizes}", *auto_tries.lines(stock, tried, alike)]) + "\n"


def _name(its: PredictedRun, config: Fold3DConfig, said: Described) -> str:
    """Return the name of the run: the word of its schedule, and the numbers of layers."""
    c = its.candidate
    if config.plan_file is not None:
        name = str(config.plan_file)
    else:
        name = c.name if c.is_stock else str(c.choice)
    if its.auto_replicated and not c.choice.where(optimizer="replicated"):
        name += ":optimizer=sharded"
    for flag, counts, is_given in (
        ("--recompute-layers", c.recompute_layers, True),
        ("--layers", c.layers, said.args.layers is not None),
    ):
        if counts and is_given:
            name += f" {flag} {','.join(map(str, counts))}"
    return name

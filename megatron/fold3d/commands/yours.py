"""The run of a user's own flags, and what each of stock Megatron's flags alone would bring to it.

Before a user takes another schedule, these are what costs least: the run stays as it is, with one
flag more or less. All sizes of parallelism and the micro-batch stay.
"""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from megatron.fold3d.commands.cost_sources import on_cluster
from megatron.fold3d.commands.job import (
    as_run,
    codes_of,
    config_of,
    default_queues,
    left_out,
    run_of,
)
from megatron.fold3d.commands.megatron_flags import Described, described
from megatron.fold3d.commands.training_flags import CHOSEN, without
from megatron.fold3d.commands.training_words import unread
from megatron.fold3d.plan.schedule_word import AUTO
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.model_shape import ModelShape
from megatron.fold3d.predict.search.candidates import MOST_SEGMENTS, RECOMPUTES, Candidate
from megatron.fold3d.predict.search.neighbours import (
    neighbours,
    with_codes,
    with_other_sums,
)
from megatron.fold3d.predict.search.planner import judged, strongest_stock
from megatron.fold3d.predict.search.search_result import JudgedCandidate

NOT_MODELLED = "--ddp-num-buckets", "--ddp-bucket-size"
"""Flags of stock that may gain, and that no prediction counts."""
_SIXTEEN_BITS = "--grad-reduce-in-bf16"
CHANGES_RESULTS = frozenset({_SIXTEEN_BITS})


@dataclass(frozen=True, slots=True)
class OneFlag:
    """A user's run with one flag of stock added or dropped, and with the flags that this needs."""

    flags: str
    run: JudgedCandidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Yours:
    """The run of a user's own flags.

    Attributes:
        alone: the run with each of stock's flags that it lacks, fastest first; empty if the run has
            a schedule of ours.
        same_layout: the fastest stock of the run's layout, if any fits.
        coded: the run with coded all-gathers as well, if it lacks them and can have them.
    """

    run: JudgedCandidate
    alone: tuple[OneFlag, ...]
    same_layout: JudgedCandidate | None
    coded: JudgedCandidate | None = None


def yours(user: Described, cluster: Cluster) -> tuple[Yours | None, tuple[str, ...]]:
    """Return the run of a user's own flags on all of a cluster's GPUs, and what to note of it.

    A typed flag counts too, unless it is a size for the search that the user's flags have as well.
    """
    known = CHOSEN - {flag.removeprefix("--") for flag in unread(user.own_words, ())}
    typed = [*without(user.typed_words, known)]
    own = described(user.own_words, typed=typed, script=user.script)
    own.args.cuda_device_max_connections = str(default_queues(own.args, cluster))
    try:
        config, shape = config_of(own, cluster), own.model()
        if config.plan_file is not None:
            raise ValueError("`fold3d simulate` predicts plan files")
        settled = run_of(own.args, config, on_cluster(shape, cluster), shape, cluster).settled()
        run = settled.candidate
        flags = replace(run.job, order=None) if run.is_stock else None
        found = judged(shape, cluster, replace(run, flags=flags))
        coded = next(with_codes(replace(run, flags=flags), codes_of(own.args, cluster)), None)
        if coded is not None and coded.setup == run.setup:
            coded = None
        faster = None if coded is None else judged(shape, cluster, coded)
        alone = _tried_alone(shape, cluster, own.args, found.candidate)
        alike = strongest_stock(shape, cluster, run)
    except ValueError as error:
        return None, (f"no row for {own.source} as it is: {error}",)
    not_counted = [*left_out(own.args)]
    if config.choice.order == AUTO:
        not_counted.append("what --schedule auto chooses")
    if found.device_bytes > cluster.gpu_memory_bytes:
        not_counted.append("that it needs more memory than there is")
    notes = (f"not counted in yours: {', '.join(not_counted)}",) if not_counted else ()
    return Yours(run=found, alone=alone, same_layout=alike, coded=faster), notes


def _tried_alone(
    shape: ModelShape, cluster: Cluster, args: Namespace, own: Candidate
) -> tuple[OneFlag, ...]:
    """Return a user's run with each of stock's flags that it lacks and that fits, fastest first.

    If a flag takes several numbers or further flags, only the fastest variant counts.
    """
    best: dict[str, OneFlag] = {}
    for flags, candidate in _variants(args, own, shape.num_layers) if own.is_stock else ():
        with suppress(ValueError):  # nodes do not have equal ways through the switches
            run, name = judged(shape, cluster, candidate), flags.partition(" ")[0]
            known, fits = best.get(name), run.device_bytes <= cluster.usable_bytes
            if fits and (not known or run.iteration_s < known.run.iteration_s):
                best[name] = OneFlag(flags, run)
    return tuple(sorted(best.values(), key=lambda one: one.run.iteration_s))


def _variants(args: Namespace, own: Candidate, num_layers: int) -> Iterator[tuple[str, Candidate]]:
    """Yield flags, and the run with them; several whose first flag is the same are its numbers."""
    sums, gathers = args.overlap_grad_reduce, args.overlap_param_gather
    for flags, other in (*_with_other_setup(args, own), *_with_other_order(own, num_layers)):
        yield flags, as_run(other, overlaps=sums, gathers=gathers)
    yield from _with_overlaps(own, sums=sums, gathers=gathers)


def _with_overlaps(own: Candidate, *, sums: bool, gathers: bool) -> Iterator[tuple[str, Candidate]]:
    """Yield the distributed optimizer, and overlaps of DP.sync with computation."""
    setup = own.setup
    if setup.most_replicas == 1:
        return
    if not sums:
        yield "--overlap-grad-reduce", as_run(own, overlaps=True, gathers=gathers)
    for other in with_other_sums(own) if sums else ():
        flags = "" if other.aligned else "--no-align-grad-reduce"
        if (instances := other.setup.optimizer_instances) > 1:
            flags = f"--num-distributed-optimizer-instances {instances} {flags}".strip()
        yield flags, as_run(other, overlaps=True, gathers=gathers)
    more = "" if sums else " --overlap-grad-reduce"  # which Megatron asks for
    if setup.distributed_optimizer and not gathers:
        yield f"--overlap-param-gather{more}", as_run(own, overlaps=True, gathers=True)
    if not setup.distributed_optimizer:
        flag = "--use-distributed-optimizer"
        sharded = replace(own, setup=replace(setup, distributed_optimizer=True))
        yield flag, as_run(sharded, overlaps=sums, gathers=False)
        both = as_run(sharded, overlaps=True, gathers=True)
        yield f"{flag} --overlap-param-gather{more}", both


def _with_other_setup(args: Namespace, own: Candidate) -> Iterator[tuple[str, Candidate]]:
    """Yield other precision of gradients, other places of ranks, and less recomputation."""
    setup, ranks = own.setup, own.num_ranks
    if args.bf16 and setup.most_replicas > 1 and not setup.small_gradients:
        yield _SIXTEEN_BITS, replace(own, setup=replace(setup, small_gradients=True))
    if setup.tensor_parallel > 1 and not setup.sequence_parallel:
        yield "--sequence-parallel", replace(own, setup=replace(setup, sequence_parallel=True))
    if ranks > 1 and setup.data_parallel > 1 and setup.order == "tp-dp-pp":
        placed = replace(setup, order="tp-pp-dp")
        yield "--use-tp-pp-dp-mapping", replace(own, setup=placed)
    least = 0 if setup.keeps_scores else 1
    for recompute in RECOMPUTES[least : RECOMPUTES.index(setup.recompute)]:
        flag = "without --recompute-granularity"
        if recompute == "selective" and least == 0:
            flag = "--recompute-granularity selective"
        yield flag, replace(own, setup=replace(setup, recompute=recompute))


def _with_other_order(own: Candidate, num_layers: int) -> Iterator[tuple[str, Candidate]]:
    """Yield other numbers of virtual stages, other groups, and the overlap of experts."""
    setup, ranks, segments = own.setup, own.num_ranks, own.num_segments
    may_combine = setup.expert_parallel > 1 and not setup.fp32 and setup.recompute != "full"
    if may_combine and not own.combined and (segments > 1 or ranks == 1):
        yield "--overlap-moe-expert-parallel-comm", replace(own, combined=True)
    if ranks == 1:
        return
    for number in range(2, MOST_SEGMENTS + 1):
        is_even = len({*own.layers}) < 2 and num_layers % (ranks * number) == 0
        if is_even and number != segments and own.num_microbatches % ranks == 0:
            yield (
                f"--num-virtual-stages-per-pipeline-rank {number} "
                "--overlap-p2p-communication-warmup-flush",
                replace(own.with_options(segments=own.choice.segments[:1] * number), layers=()),
            )
    if segments > 1:
        of_all = own.with_options(group=own.num_microbatches)
        for other in (*neighbours(own, num_layers), of_all):
            if (size := other.choice.group) not in (None, own.choice.group):
                yield f"--microbatch-group-size-per-virtual-pipeline-stage {size}", other

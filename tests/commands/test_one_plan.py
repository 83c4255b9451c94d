"""The plan that ranks run is what `fold3d simulate` and ``--check`` predict, word for word.

What a run measures (shares, forwards ahead, gaps, what ``auto`` keeps) is taken from the
prediction. The rest of the plan then has to be the same.
"""

import io
import os
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.training import global_vars

from fold3d_patches.cpu import flags as cpu_flags
from megatron.fold3d.commands.auto_tries import tries
from megatron.fold3d.commands.cost_sources import _SECONDS, in_numbers
from megatron.fold3d.commands.job import config_of, run_of
from megatron.fold3d.commands.megatron_flags import described
from megatron.fold3d.config.all_flags import megatron_defaults
from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.config.read_config import read_config
from megatron.fold3d.plan.compile import Job, lower
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.policy.measured_times import MeasuredTimes
from megatron.fold3d.predict.search.measured_search import measured_search
from megatron.fold3d.predict.search.settled import PredictedRun
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.runtime.plans import Plans
from megatron.fold3d.training import launch
from tests.distributed import run_distributed
from tests.end_to_end import (
    test_backward_share,
    test_equal_to_stock,
    test_offload,
    test_paired_experts,
    test_param_shards,
    test_replicated_optimizer,
)
from tests.stress.flag_sets import add_own_arguments, draw, random_plan

NUMBERS = in_numbers(
    Namespace(
        costs=None, seconds=[("recompute_s", 0.25), ("tp_sync_s", 0.25), ("grad_sync_s", 6.0)]
    )
)


def trained(config: Fold3DConfig, num_microbatches: int, predicted: Job) -> Plan:
    """Return what ranks run, once they have measured what the prediction says."""
    job = Plans(config).job(num_microbatches)
    if config.auto:
        job = replace(job, choice=predicted.choice)
    if config.auto or config.choice.fills_gaps:
        job = replace(job, order=predicted.order)
    return lower(replace(job, shares=predicted.shares))


def predicted(run: PredictedRun) -> Job:
    return run.settled().simulated().job


def check(parser: ArgumentParser, words: Sequence[str]) -> None:
    """Compare the plan of a run with what is predicted of its words, and of its namespace."""
    words = [*cpu_flags.FLAGS, *words]
    args = parser.parse_args(words)
    args.data_parallel_size = 2
    for name, value in megatron_defaults(args).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.accumulate_allreduce_grads_in_fp32 |= args.bf16 and not args.grad_reduce_in_bf16
    config = read_config(args)
    args.virtual_pipeline_model_parallel_size = config.num_segments
    said = described(words, typed=("--dp", "2"))
    by_words = run_of(said.args, config_of(said), NUMBERS)
    by_namespace = run_of(args, config, NUMBERS)
    for job in map(predicted, (by_words, by_namespace)):
        runs = trained(config, by_words.candidate.num_microbatches, job)
        assert lower(job).to_text() == runs.to_text()


TABLES = (
    test_equal_to_stock,
    test_backward_share,
    test_replicated_optimizer,
    test_param_shards,
    test_offload,
    test_paired_experts,
)
ROWS = [
    pytest.param(row, id=f"{table.__name__.rpartition('.')[2]}, {row}")
    for table in TABLES
    for row in table.ROWS
    # Without one number of micro-batches, or with layers that the planner does not model.
    if not re.search("batch-size-schedule|mtp-num-layers", row.flags)
]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_end_to_end_tables_runs_what_is_predicted(parser, row, fold3d, tmp_path):
    ours = row.ours
    if plan := getattr(row, "plan", ""):
        _, printed, _ = fold3d(plan.removeprefix("fold3d ")) if "fold3d" in plan else (0, plan, "")
        (tmp_path / "plan").write_text(printed)
        ours = ours.replace("PLAN", str(tmp_path / "plan"))
    words = [*row.command(ours), "--global-batch-size", str(2 * getattr(row, "m", 4))]
    check(parser, words)


def differing(words: Sequence[Sequence[str]]) -> list[str]:
    """Return the command lines of which Megatron's namespace, validated, predicts another plan."""
    found = []
    for line in words:
        global_vars.destroy_global_vars()
        destroy_num_microbatches_calculator()
        pp, tp = (
            int(line[line.index(flag) + 1]) if flag in line else 1
            for flag in ("--pipeline-model-parallel-size", "--tensor-model-parallel-size")
        )
        os.environ["WORLD_SIZE"] = str(2 * pp * tp)
        with ExitStack() as patched, redirect_stdout(io.StringIO()):
            args = launch.prepare([*line, "--check"], patched, "gpt")
            config = read_config(args)
            run = run_of(args, config, NUMBERS)
            job = predicted(run)
        if lower(job) != trained(config, job.num_microbatches, job):
            found.append(" ".join(line))
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("step", [25, pytest.param(1, marks=pytest.mark.stress)])
def test_what_check_predicts_of_a_row_runs(step: int):
    rows = [row.values[0] for row in ROWS]
    words = [
        [*row.command(row.ours), "--global-batch-size", str(2 * getattr(row, "m", 4))]
        for row in rows
        # Megatron refuses the first for two replicas, and we the second without a GPU.
        if not re.search("eval-global-batch-size|transformer_engine|PLAN", f"{row.flags} {row}")
    ]
    assert run_distributed(differing, 1, words[::step], timeout_s=1200) == [[]]


DRAWN = [pytest.param(seed, marks=[] if seed < 6 else pytest.mark.stress) for seed in range(20)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", DRAWN)
def test_a_drawn_job_runs_what_is_predicted(parser: ArgumentParser, seed: int, tmp_path: Path):
    drawn, _ = draw(f"one plan {seed}", variants=10)
    own = ArgumentParser(allow_abbrev=False)
    add_own_arguments(own)
    for number, job in enumerate(drawn):
        file = tmp_path / f"{number}.plan"
        _, words = own.parse_known_args([word.replace("PLAN", str(file)) for word in job.ours()])
        if "PLAN" in job.setting("schedule"):
            file.write_text(random_plan(job))
        if job.setting("batches") or re.search("mtp|dp-replicas", " ".join(words)):
            continue
        size = int(words[words.index("--micro-batch-size") + 1])
        check(parser, [*words, "--global-batch-size", str(2 * size * job.m)])


# Searches take seconds: each value once; `make stress` runs the other combinations.
GATHERS_IN_STEPS = "--use-distributed-optimizer"
SHARDED = f"{GATHERS_IN_STEPS} --overlap-param-gather"
IN_EVERY_RUN = (
    ((2, 4, 8), {"sum": 5}, SHARDED),
    ((2, 4, 8), {"p2p": 2}, ""),
    ((4, 1, 8), {"sum": 5, "p2p": 0.6}, ""),
    ((1, 1, 4), {"sum": 12}, SHARDED),
    ((2, 4, 8), {"sum": 5}, GATHERS_IN_STEPS),
)
SEARCHED = product(
    ((2, 4, 8), (4, 1, 8), (1, 1, 4)),
    ({"sum": 5}, {"sum": 5, "p2p": 0.6}, {"sum": 12}, {"p2p": 2}),
    ("", GATHERS_IN_STEPS, SHARDED),
)


@pytest.mark.parametrize(
    ("sizes", "seconds", "sharded"),
    [
        pytest.param(*case, marks=[] if case in IN_EVERY_RUN else pytest.mark.stress)
        for case in SEARCHED
    ],
)
def test_training_would_try_what_is_predicted_that_it_tries(sizes, seconds, sharded):
    ranks, segments, m = sizes
    words = (
        f"--pipeline-model-parallel-size {ranks} --segments {segments} --schedule auto "
        "--num-layers 16 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
        f"--micro-batch-size 1 --global-batch-size {2 * m} --overlap-grad-reduce {sharded} "
        "--transformer-impl local --no-gradient-accumulation-fusion --clip-grad 0 "
        "--attention-dropout 0 --hidden-dropout 0"
    )
    said = described(words.split(), typed=("--dp", "2"))
    config = config_of(said)
    numbers = [(_SECONDS[name], number) for name, number in seconds.items()]
    run = run_of(said.args, config, in_numbers(Namespace(costs=None, seconds=numbers)))
    first, *tried = tries(run, config)

    costs = Costs.uniform(ranks * segments, **dict(numbers))
    gathers_s = tuple(s / 2 * config.job.parameter_share for s in costs.grad_sync_s)
    in_steps = config.job.steps_shards and not config.job.gathers_params
    times = MeasuredTimes(
        forward_s=costs.forward_s,
        backward_s=costs.input_s,
        recompute_s=costs.recompute_s,
        weight_s=costs.weight_s,
        transfer_s=costs.p2p_s,
        grad_sync_s=costs.grad_sync_s,
        param_gather_s=gathers_s,  # measured with an all-reduce too
        optimizer_s=gathers_s if in_steps else (),
        other_shard_bytes=(0.0,) * segments,
    )
    job = Plans(config).job(m)
    found = measured_search(
        times,
        replace(job, choice=replace(job.choice, order=job.choice.schedule)),
        free=config.free(),
        frees_order=True,
        tied=config.ties_embeddings,
        keeps_forwards=config.keeps_forwards,
    )
    assert [str(one.choice) for one in found.to_try()] == [str(one.choice) for one in tried]
    assert found.first.seconds == first.seconds

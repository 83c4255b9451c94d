"""The run of a user's own flags, and what each of stock's flags alone brings to it."""

from itertools import pairwise
from pathlib import Path

import pytest

from megatron.fold3d.commands.megatron_flags import described
from megatron.fold3d.commands.yours import Yours, yours
from megatron.fold3d.predict.cost_model.cluster import cluster

MODEL = "--num-layers 16 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --bf16"
SPLIT = "--pipeline-model-parallel-size 2 --micro-batch-size 2 --global-batch-size 64"
JOB = f"{MODEL} {SPLIT} --transformer-impl local"
OVERLAP = "--overlap-grad-reduce"
CHUNKS = "--num-virtual-stages-per-pipeline-rank"
SHARDED = "--use-distributed-optimizer"


def of(flags: str) -> tuple[Yours | None, tuple[str, ...]]:
    return yours(described(flags.split(), script=Path("a.sh")), cluster("a100x8-100g"))


def run_of(flags: str) -> Yours:
    found, _ = of(flags)
    assert found is not None
    return found


def test_a_script_is_a_row_where_its_cluster_can_run_it():
    found, notes = of(f"{JOB} --segments 4 --overlap-grad-reduce --schedule auto")
    assert found is not None
    own = found.run.candidate
    assert (own.name, own.num_microbatches, found.alone) == ("interleaved", 8, ())
    assert notes == ("not counted in yours: what --schedule auto chooses",)
    found, (note,) = of(f"{JOB} --tensor-model-parallel-size 3")
    assert found is None
    assert note.startswith("no row for a.sh as it is: the flags take 6 GPUs for a model")


def test_typed_flags_of_the_job_count_in_yours_but_no_sizes_that_it_has():
    script = JOB.replace("--seq-length 1024", "--seq-length $LENGTH")
    script = script.replace("--micro-batch-size 2", "--micro-batch-size $SIZE")
    typed = "--seq-length 512 --global-batch-size 32 --micro-batch-size 4 --tp 4 --recompute full"
    said = described(script.split(), typed=typed.split(), script=Path("a.sh"))
    found, _ = yours(said, cluster("a100x8-100g"))
    assert found is not None
    own = JOB.replace("--seq-length 1024", "--seq-length 512").replace("size 64", "size 32")
    assert found.run == run_of(own.replace("--micro-batch-size 2", "--micro-batch-size 4")).run


def test_yours_overlaps_only_what_its_flags_let_overlap():
    chunks = f"{JOB} {CHUNKS} 4"
    overlaps = ("", OVERLAP, f"{OVERLAP} --overlap-param-gather")
    runs = [run_of(f"{chunks} {SHARDED} {more}").run.iteration_s for more in overlaps]
    assert all(slower > faster for slower, faster in pairwise(runs))


@pytest.mark.search
@pytest.mark.parametrize(
    ("own", "more"),
    [
        ("", {SHARDED}),
        (OVERLAP, {"--grad-reduce-in-bf16", CHUNKS}),
        (f"{CHUNKS} 2", {OVERLAP}),
        (f"{CHUNKS} 2 {OVERLAP}", {"--microbatch-group-size-per-virtual-pipeline-stage"}),
        (
            f"{SHARDED} {OVERLAP}",
            {"--overlap-param-gather", "--num-distributed-optimizer-instances"},
        ),
        (f"--tensor-model-parallel-size 2 {OVERLAP}", {"--sequence-parallel"}),
        (f"{CHUNKS} 4 {OVERLAP}", {"--no-align-grad-reduce"}),
    ],
)
def test_a_flag_alone_brings_what_the_job_with_it_takes(own: str, more: set[str]):
    alone = run_of(f"{JOB} {own}").alone
    assert more <= {one.flags.partition(" ")[0] for one in alone}
    seconds = [one.run.iteration_s for one in alone]
    assert seconds == sorted(seconds)
    assert seconds == [run_of(f"{JOB} {own} {one.flags}").run.iteration_s for one in alone]


def test_less_recomputation_is_tried_only_where_memory_has_room():
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    names = {one.flags for one in run_of(f"{JOB} {full}").alone}
    assert {"without --recompute-granularity", "--recompute-granularity selective"} <= names
    long = run_of(f"{JOB.replace('--seq-length 1024', '--seq-length 8192')} {full}").alone
    assert "without --recompute-granularity" not in {one.flags for one in long}


def test_the_strongest_of_stock_in_its_layout_is_no_slower_than_one_flag_alone():
    found = run_of(JOB)
    assert found.same_layout is not None
    of_32_bits = [one for one in found.alone if one.flags != "--grad-reduce-in-bf16"]
    assert found.same_layout.iteration_s <= of_32_bits[0].run.iteration_s
    assert found.same_layout.candidate.layout == found.run.candidate.layout


def test_coded_gathers_are_tried_under_the_jobs_own_schedule():
    def on_slow_links(flags: str) -> Yours:
        found, _ = yours(described(flags.split()), cluster("a100x32-10g"))
        assert found is not None
        return found

    assert on_slow_links(f"{JOB} {OVERLAP}").coded is None  # nothing is gathered
    sharded = f"{JOB} {SHARDED} {OVERLAP} --overlap-param-gather"
    plain, with_flag, slow = (
        on_slow_links(f"{sharded} {flags}")
        for flags in ("", "--delta-param-gather on --coded-grad-reduce on", "--lr 6e-4")
    )
    assert plain.coded is not None
    assert slow.coded is not None
    assert plain.coded.iteration_s < slow.coded.iteration_s < plain.run.iteration_s
    assert with_flag.run.iteration_s == plain.coded.iteration_s
    assert with_flag.coded is None
    assert with_flag.same_layout is not None
    assert with_flag.same_layout.candidate.setup.gathered_bits == 0

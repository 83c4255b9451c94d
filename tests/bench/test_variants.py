from dataclasses import replace

import pytest

from scripts.bench import variants
from scripts.bench.compare import main
from scripts.bench.variants import DEFAULT, Job, Variant

JOB = Job(
    num_ranks=2,
    data_parallel=4,
    num_microbatches=8,
    num_layers=16,
    hidden_size=256,
    seq_length=32,
    micro_batch_size=3,
    num_iterations=10,
    clip_grad=0.0,
    recompute=False,
)


def value(flags, name):
    return flags[list(flags).index(name) + 1]


def test_the_batch_feeds_every_pipeline_its_microbatches():
    assert value(JOB.flags(), "--global-batch-size") == str(8 * 4 * 3)
    assert JOB.world_size == 8


def test_recompute_is_the_same_for_all():
    assert "--recompute-granularity" not in JOB.flags()
    assert value(replace(JOB, recompute=True).flags(), "--recompute-granularity") == "full"


def test_layers_that_ranks_cannot_share_are_refused_with_a_number_that_works():
    with pytest.raises(ValueError, match="--layers 15 is not divisible by --pp 2; try --layers 14"):
        replace(JOB, num_layers=15)


def test_a_job_without_ranks_is_refused():
    with pytest.raises(ValueError, match="--pp 0: it is at least one"):
        replace(JOB, num_ranks=0)


def test_the_sweep_has_every_even_cut_from_depth_first_to_breadth_first():
    names = {variant.name for variant in variants.known(JOB)}
    assert {f"stock-v{v}-n{n}-do" for v in (2, 4, 8) for n in (2, 4, 8)} <= names
    assert "stock-v3-n2" not in names


def test_without_a_pipeline_nothing_is_interleaved():
    names = [variant.name for variant in variants.known(replace(JOB, num_ranks=1))]
    assert not any(name.startswith(("stock-v", "aiao-s2")) for name in names)


def test_names_are_unique():
    names = [variant.name for variant in variants.known(JOB)]
    assert len(names) == len(set(names))


def test_breadth_first_groups_all_microbatches():
    found = {variant.name: variant.flags for variant in variants.known(JOB)}
    group = "--microbatch-group-size-per-virtual-pipeline-stage"
    assert value(found["stock-v8-n8"], group) == "8"
    assert value(found["stock-v8-n2"], group) == "2"


def test_stock_is_what_names_no_schedule():
    stock = ("stock", "megatron", "dspeed3d")
    assert all(v.is_stock == v.name.startswith(stock) for v in variants.known(JOB))


def test_the_default_always_takes_part_and_comes_first():
    chosen = variants.choose(list(variants.known(JOB)), ["aiao-s8"], None)
    assert [variant.name for variant in chosen] == ["stock-default", "aiao-s8"]


def test_the_distributed_optimizer_selects_variants():
    every = list(variants.known(JOB))
    chosen = variants.choose(every, ["aiao-s8*"], True)
    assert [variant.name for variant in chosen] == ["stock-default", "aiao-s8-do"]


def test_a_pattern_that_names_no_variant_is_refused():
    with pytest.raises(ValueError, match="no variant is called aio; there are stock-default"):
        variants.choose([DEFAULT], ["aio"], None)


def test_a_file_adds_variants(tmp_path):
    path = tmp_path / "more.toml"
    path.write_text('deferred = "--schedule aiao --segments 8"\n')
    assert variants.read(path) == [Variant("deferred", ("--schedule", "aiao", "--segments", "8"))]


@pytest.mark.parametrize("text", ["deferred = 3", "deferred = ", "[deferred]\nflags = 1"])
def test_a_file_of_another_form_is_refused_in_one_line(tmp_path, text, capsys):
    path = tmp_path / "more.toml"
    path.write_text(text)
    assert main(["--variants", str(path), "--list"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"compare.py: error: --variants {path}: ")
    assert error.count("\n") == 1


def test_a_comparison_without_iterations_to_time_is_refused(capsys):
    assert main(["--iterations", "3", "--warmup", "3"]) == 2
    assert "nothing to time" in capsys.readouterr().err


def test_the_list_names_what_would_run(capsys):
    assert main(["--list", "--only", "aiao-s4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["stock-default", "aiao-s4"]

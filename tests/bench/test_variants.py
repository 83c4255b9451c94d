import re
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.bench import variants
from scripts.bench.compare import main
from scripts.bench.variants import DEFAULT, Job, Variant

JOB = Job(data_parallel=4, micro_batch_size=3)
FEATURES = Path(variants.__file__).with_name("features.toml")


def value(flags, name):
    return flags[list(flags).index(name) + 1]


def test_the_batch_feeds_every_pipeline_its_microbatches():
    assert value(JOB.flags(), "--global-batch-size") == str(8 * 4 * 3)
    assert (JOB.world_size, replace(JOB, tensor_parallel=2).world_size) == (8, 16)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_layers": 15}, "--layers 15 is not divisible by --pp 2; try --layers 14"),
        ({"num_ranks": 0}, "--pp 0: it is at least one"),
    ],
)
def test_a_job_that_cannot_be_is_refused_with_what_can(changed, message):
    with pytest.raises(ValueError, match=message):
        replace(JOB, **changed)


def test_options_are_of_the_job_and_others_are_its_own():
    parser = ArgumentParser()
    variants.add_job_options(parser, JOB)
    args = parser.parse_args(["--dp", "2", "--recompute"])
    assert variants.job_of(args, JOB) == replace(JOB, data_parallel=2, recompute=True)


def test_the_sweep_has_every_even_cut_from_depth_first_to_breadth_first():
    names = {variant.name for variant in variants.known(JOB)}
    assert {f"stock-v{v}-n{n}-do" for v in (2, 4, 8) for n in (2, 4, 8)} <= names
    assert "stock-v3-n2" not in names


def test_stock_is_what_names_no_schedule():
    stock = ("stock", "megatron", "dspeed3d")
    assert all(v.is_stock == v.name.startswith(stock) for v in variants.known(JOB))


@pytest.mark.parametrize(
    ("pattern", "distributed", "names"),
    [("aiao-s8", None, ["aiao-s8"]), ("aiao-s8*", True, ["aiao-s8-do"])],
)
def test_the_default_takes_part_in_what_is_chosen(pattern, distributed, names):
    chosen = variants.choose(list(variants.known(JOB)), [pattern], distributed)
    assert [variant.name for variant in chosen] == ["stock-default", *names]


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


COMMANDS = re.findall(r"^#     (--only(?:.*\\\n#)*.*)$", FEATURES.read_text(), re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_single_features_are_compared_by_the_commands_in_their_file(command, parser, capsys):
    words = re.sub(r"\\\n#|'", " ", command).split()
    assert main(["--variants", str(FEATURES), "--list", *words]) == 0
    default, *others = capsys.readouterr().out.splitlines()
    assert default.split() == ["stock-default"]
    assert len(others) > 2
    for other in others:
        parser.parse_args(other.split()[1:])

"""What the answer of a search says of gains, ties, flags and pictures."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fold3d.commands.search_lines import (
    WIDTH,
    _in_16_bits,
    _table,
    environment,
    gains_over_yours,
    plot,
    rates_of,
    verdict,
)
from megatron.fold3d.commands.training_flags import training_flags
from megatron.fold3d.commands.yours import OneFlag, Yours
from megatron.fold3d.observe.exposure import Exposure
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.predict.cost_model.cluster import cluster
from megatron.fold3d.predict.cost_model.model_shape import model_shape
from megatron.fold3d.predict.cost_model.sizes import Setup
from megatron.fold3d.predict.search.candidates import Candidate
from megatron.fold3d.predict.search.search_result import JudgedCandidate, Search
from megatron.fold3d.predict.search.sensitivity import Case

SETUP = Setup(tensor_parallel=8, data_parallel=4, microbatch_size=4, distributed_optimizer=True)
AIAO = Candidate(choice=Choice.plain("aiao", 4), setup=SETUP, num_ranks=4, num_microbatches=16)
STOCK = AIAO.with_options(order="stock", group=16)


def judged(candidate: Candidate, seconds: float, **shares: float) -> JudgedCandidate:
    return JudgedCandidate(candidate, seconds, 20 * 2**30, Exposure(**shares))


def found(*best: JudgedCandidate, stock: float = 6.0, **more: object) -> Search:
    return Search(
        best=best,
        best_stock=judged(STOCK, stock),
        considered=9,
        too_large=1,
        **more,  # type: ignore[arg-type]
    )


def test_rows_are_sorted_by_time_and_what_takes_as_long_is_one_row():
    whole = replace(AIAO, setup=replace(SETUP, distributed_optimizer=False))
    selective = replace(SETUP, order="tp-pp-dp", recompute="selective", keeps_scores=True)
    around = replace(AIAO, setup=selective)
    first = judged(AIAO, 5.0, forward_s=4.5, bubble_s=0.5)
    rows = (first, judged(around, 5.006), judged(whole, 5.001))
    other = judged(replace(AIAO, choice=Choice.plain("aiao", 2)), 5.002)
    assert list(_table(found(*rows, other))) == [
        "iteration   GiB   dp  pp tp seg mbs sums  rec   limit       schedule",
        "   5.00 s  20.0    4   4  8   4   4 shard none  bubble 10%  aiao",
        "           20.0 as fast: whole",
        "           20.0 as fast: sel, aiao tp-pp-dp",
        "   5.00 s  20.0    4   4  8   2   4 shard none  compute     aiao",
        "   6.00 s  20.0    4   4  8   4   4 shard none  compute     stock breadth-first",
    ]


def test_rows_show_in_what_they_differ():
    others = (
        AIAO,
        replace(AIAO, layers=(3, 3, 2, *(2,) * 13)),
        replace(AIAO, layers=(3, *(2,) * 14, 3)),
        replace(AIAO, recompute_layers=(1,) * 16),
        replace(AIAO, recompute_layers=(0,) * 15 + (1,)),
    )
    said = "\n".join(_table(found(*(judged(c, 5 + n / 10) for n, c in enumerate(others)))))
    named = "layers=3x2,2x14", "layers=3,2x14,3", "recompute=1x16", "recompute=0x15,1"
    assert [word for word in said.split() if "=" in word] == [*named]


def test_the_users_own_run_has_a_row_of_its_own():
    said = list(_table(found(judged(AIAO, 5.0)), judged(AIAO, 5.0)))
    assert [line[60:] for line in said[1:3]] == ["aiao", "yours: aiao"]


def test_no_row_is_wider_than_a_terminal():
    long = replace(AIAO.with_options(ahead=3).changed(step="next"), shards="gradients")
    assert max(map(len, "\n".join(_table(found(judged(long, 0.01)))).splitlines())) <= WIDTH


@pytest.mark.parametrize(
    ("gains", "said"),
    [
        (
            (0.2, 0.1, 0.3),
            "same layout: 4.0% faster; best layout of each: 10.0% to 30.0% faster, if stock waits "
            "for its sends, which no GPU has confirmed; with these flags",
        ),
        (
            (0.2, -0.05, 0.3),
            "measure first: same layout: 4.0% faster; best layout of each: 5.0% slower to 30.0% "
            "faster, if stock waits for its sends, which no GPU has confirmed; what decides is "
            "what NICs achieve: measure it; ours has these flags",
        ),
    ],
)
def test_a_gain_that_an_assumption_turns_into_a_loss_is_to_be_measured(gains, said: str):
    cases = [Case("assumed", gain, "what NICs achieve", "measure it") for gain in gains]
    alike = judged(STOCK, 5.2)
    assert verdict(found(judged(AIAO, 5.0), same_layout=alike), cases) == said
    alone = verdict(found(judged(AIAO, 5.0)), cases)
    assert alone == said.replace("4.0% faster;", "no stock configuration fits;")


def test_stock_is_the_answer_where_ours_gains_nothing():
    assert verdict(found(judged(AIAO, 5.99)), [Case("assumed", 0.001)]).startswith("AIAO gains")


@pytest.mark.parametrize(
    ("whole_s", "aiao_s", "stock_s", "order", "rests"),
    [
        (5.0, 4.0, 4.5, "aiao", "GPUs code as fast as their memory allows and stock waits"),
        (5.0, 4.0, 4.03, "stock", "GPUs code as fast as their memory allows, which"),
        (5.0, 4.97, 5.5, "aiao", "stock waits"),
    ],
)
def test_coded_gathers_are_ours_where_they_gain_a_percent(whole_s, aiao_s, stock_s, order, rests):
    model, a100 = model_shape("gpt3-39b"), cluster("a100x128")
    setup = replace(SETUP, gathered_bits=2.5)
    coded = [judged(replace(c, setup=setup), s) for c, s in ((AIAO, aiao_s), (STOCK, stock_s))]
    search = found(judged(AIAO, whole_s), coded=tuple(coded), same_layout=judged(STOCK, 6.0))
    ours = search.choice.candidate
    assert ours.choice.order == order
    assert ours.is_ours
    said = verdict(search, [Case("assumed", 0.2)])
    assert f"if {rests}" in said
    named = [line for line in _table(search) if "--delta-param-gather auto" in line]
    assert len(named) == 2
    assert ("--delta-param-gather auto" in training_flags(model, a100, ours)) == (ours != AIAO)


def test_16_bits_are_counted_on_both_sides_with_what_they_change():
    rounded = replace(SETUP, small_gradients=True, accumulates_in_fp32=True)
    both = [judged(replace(c, setup=rounded), s) for c, s in ((AIAO, 4.5), (STOCK, 5.7))]
    said = list(_in_16_bits(found(judged(AIAO, 5.0), in_16_bits=tuple(both))))
    assert said[0].endswith("; each beside its own best in 32:")
    assert "4.50 s, 11.1% faster: aiao" in said[1]
    assert "5.70 s, 5.3% faster: stock breadth-first" in said[3]
    assert "--ddp-param-name-patterns-for-fp32-local-accumulation all" in said[2]
    assert said[-1] == ("  micro-batches add up in 32 bits; what a replica sends is rounded to 16")
    alone = replace(STOCK, setup=replace(SETUP, data_parallel=1))
    ours = replace(found(judged(AIAO, 5.0), in_16_bits=(both[0],)), best_stock=judged(alone, 4.9))
    assert [line for line in _in_16_bits(ours) if " faster" in line or "gains" in line] == [
        "  4.50 s, 11.1% faster: aiao with --use-distributed-optimizer",
        "  gains nothing: stock breadth-first, as it has no replicas",
    ]


def test_stocks_flags_come_before_ours_largest_first():
    own = judged(STOCK, 10.0)
    alone = (
        OneFlag("--grad-reduce-in-bf16", judged(STOCK, 8.0)),
        OneFlag("--use-distributed-optimizer", judged(STOCK, 9.0)),
        OneFlag("--sequence-parallel", judged(STOCK, 10.2)),
    )
    codes = replace(STOCK, setup=replace(SETUP, gathered_bits=2.5, summed_bits=11.5))
    mine = Yours(run=own, alone=alone, same_layout=judged(STOCK, 6.25), coded=judged(codes, 8.0))
    others = replace(AIAO, num_ranks=8)
    assert list(gains_over_yours(found(judged(others, 5.0)), mine)) == [
        "yours takes 10.0 s; try these of stock's flags first, each alone:",
        "   25.0% faster  --grad-reduce-in-bf16, which changes results",
        "   11.1% faster  --use-distributed-optimizer",
        "  gain nothing: --sequence-parallel",
        "  not modelled: --ddp-num-buckets, --ddp-bucket-size",
        "   60.0% faster  stock, same layout: stock breadth-first, 4 segments,",
        "                 --use-distributed-optimizer, recomputes none",
        "   66.7% faster  stock, any layout: stock breadth-first, 4 segments,",
        "                 --use-distributed-optimizer, recomputes none",
        "   25.0% faster  FOLD3D, your schedule: --delta-param-gather auto",
        "                 --coded-grad-reduce auto",
        "  100.0% faster  FOLD3D, any layout: aiao",
    ]


def test_the_environment_has_one_queue_where_megatron_demands_it():
    a100, b200 = cluster("a100x128"), cluster("b200x128")
    one, many = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    alone = replace(AIAO, setup=replace(SETUP, tensor_parallel=1))
    assert environment(AIAO, a100) == environment(STOCK, a100) == one
    assert environment(AIAO, b200) == environment(alone, a100) == many
    assert environment(alone.with_options(order="stock"), a100) == {}


def test_rates_are_of_one_gpu_and_of_all():
    a100 = cluster("a100x128")
    rates = rates_of(judged(AIAO, 5.0), model_shape("gpt3-39b"), a100)
    assert rates["tokens_per_s"] == pytest.approx(256 * 1024 / 5)
    assert rates["mfu"] == pytest.approx(rates["flops_per_gpu_s"] / 312e12)


@pytest.mark.processes
def test_a_picture_shows_what_was_tried(tmp_path: Path):
    pytest.importorskip("matplotlib")
    best = judged(AIAO, 5.0)
    plot(found(best, tried=(best, judged(STOCK, 6.0))), tmp_path / "tried.svg")
    assert (tmp_path / "tried.svg").read_text().count("<use") > 2


@pytest.mark.processes
def test_a_picture_leaves_matplotlibs_settings_as_they_were(tmp_path: Path):
    matplotlib = pytest.importorskip("matplotlib")
    before = dict(matplotlib.rcParams)
    plot(found(judged(AIAO, 5.0)), tmp_path / "tried.svg")
    assert dict(matplotlib.rcParams) == before


def test_a_picture_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(
        ValueError, match=r"no picture without matplotlib: pip install '.\[plots\]'"
    ):
        plot(found(judged(AIAO, 5.0)), tmp_path / "tried.svg")

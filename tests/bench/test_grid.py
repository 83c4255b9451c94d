"""The grid's table, from runs that nobody had to make."""

import json
from argparse import Namespace
from dataclasses import replace

import pytest

from scripts.bench import grid, sync_cells
from scripts.bench.grid import Grid
from scripts.bench.sync_cells import SyncCell
from scripts.bench.variants import DEFAULT

CELL = SyncCell(num_ranks=2, data_parallel=2, recompute=False, rate="100mbit")
MS = {
    "stock-default": 200.0,
    "stock-v8-n8-do": 150.0,
    "stock-v8-n8": 160.0,
    "aiao-s8-do": 148.0,
    "aiao-s8-auto-bound": 130.0,
    "aiao-s8-auto-delay": 125.0,
    "chosen-s8": 128.0,
    "chosen-s8-auto-unclipped": 120.0,
}


def written(tmp_path, **changes):
    """The cell with the runs of one round; ``changes`` are of the shaped runs, by variant."""
    entries = {}
    for name, ms in MS.items():
        for link, time_ms in (("unshaped, {}, round 0", 100.0), ("100mbit, {}, round 1", ms)):
            iterations = [{"number": n, "elapsed_ms": time_ms, "loss": 4.0 / n} for n in (1, 2, 3)]
            entry = {"round": int("round 1" in link), "iterations": iterations, "warmup": 1}
            entry |= {"link_bytes": 1e6, "other_cpus": 0.0, "failure": ""}
            if "round 1" in link:
                entry |= changes.get(name, {})
            entries[f"pp=2 x dp=2, {link.format(name)}"] = entry
    (tmp_path / "runs.json").write_text(json.dumps(entries))
    return [(CELL, Grid(Namespace(logs=tmp_path, rounds=1)).runs(CELL))]


def test_a_cell_has_the_exposure_of_the_default_and_a_line_for_each_variant(tmp_path):
    title, _, _, _, default, *others = sync_cells.table(written(tmp_path)).splitlines()
    assert title == "pp=2 x dp=2, 100mbit, 50% of stock's default exposed"
    assert (
        default
        == "| stock-default | 200 (200-200) | 25.0% slower | 0.0% faster | 100 | 80 | 2.00 |"
    )
    names = [line.split(" | ")[0].strip("| ") for line in others]
    assert names == ["**stock-v8-n8-do**", *(name for name in list(MS)[2:])]


def test_a_loss_that_differs_and_a_run_that_failed_are_said(tmp_path):
    odd = {"iterations": [{"number": 1, "elapsed_ms": 1.0, "loss": 3.9}]}
    failed = {"failure": "rank 0 died"}
    [(cell, runs)] = written(tmp_path, **{"aiao-s8-do": odd, "stock-v8-n8": failed})
    problems = list(cell.problems(runs))
    assert len(problems) == 2
    assert "aiao-s8-do, round 1: losses differ" in problems[0]
    assert problems[1] == "pp=2 x dp=2, 100mbit: stock-v8-n8: rank 0 died"


def test_a_cell_that_is_slowed_down_has_slower_layers_and_links_and_a_key_of_its_own():
    slower = replace(CELL, slow_down=2)
    assert slower.layer_ms == (2 * CELL.layer_ms[0], 2 * CELL.layer_ms[1])
    assert (slower.link.rate_bit_s, replace(CELL, rate="unshaped").link.rate_bit_s) == (5e7, None)
    key = "2 times slower: pp=2 x dp=2, {}, stock-default, round {}"
    assert slower.key(DEFAULT, 1) == key.format("100mbit", 1)
    assert slower.key(DEFAULT, 0) == key.format("unshaped", 0)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("--slow-down 0.5", "--slow-down 0.5: it is 1 or more"),
        ("--only nowhere", "--only nowhere: no cell has that in its name"),
        ("--pipeline-bound --bounds", "--bounds with --pipeline-bound: its table has bounds"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(flags, found, capsys):
    with pytest.raises(SystemExit):
        grid.main(flags.split())
    assert found in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "listed"),
    [
        (["--only", "dp=2, recompute, 70"], ["pp=2 x dp=2, recompute, 70mbit"]),
        (["--only", "dp=4, recompute"], ["pp=2 x dp=4, recompute, 48mbit"]),
        (
            ["--pipeline-bound", "--only", "pp=4 x dp=1, m=8, 40%", "dp=2, recompute, m=32"],
            [
                "pp=4 x dp=1, m=8, 40%",
                *(f"pp=8 x dp=2, recompute, m=32, {share}%" for share in (20, 40, 80)),
            ],
        ),
    ],
)
def test_cells_are_chosen_by_name(flags, listed, capsys):
    assert grid.main(["--list", *flags]) == 0
    assert capsys.readouterr().out.splitlines() == listed


def test_bounds_stand_beside_what_was_measured(tmp_path):
    slow = {"iterations": [{"number": n, "elapsed_ms": 9000.0, "loss": 4.0 / n} for n in (1, 2, 3)]}
    *_, line = sync_cells.bounds_table(written(tmp_path, **dict.fromkeys(MS, slow))).splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:2] == ["pp=2 x dp=2, 100mbit", "9000"]
    free_ms, clipped_ms = float(cells[2]), float(cells[6])
    # Eight layers per rank take 288 ms each, and the last rank begins one forward later.
    assert 8 * 8 * 36 < free_ms <= clipped_ms < 9000
    assert abs(float(cells[3].removesuffix("% faster")) / 100 + 1 - 9000 / free_ms) < 2e-3
    assert cells[4:6] == ["9000", "0.0% faster"]
    assert cells[8:] == ["9000", "0.0% faster"]

"""The grid's table, from runs that nobody had to make."""

import json
from argparse import Namespace
from dataclasses import replace

import pytest

from scripts.bench import grid
from scripts.bench.grid import Grid, Layout
from scripts.bench.variants import DEFAULT

LAYOUT = Layout(num_ranks=2, data_parallel=2, recompute=False, rates=("100mbit",))
MS = {
    "stock-default": 200.0,
    "stock-v8-n8-do": 150.0,
    "stock-v8-n8": 160.0,
    "aiao-s8-do": 148.0,
    "aiao-s8-auto-bound": 130.0,
    "aiao-s8-auto-delay": 125.0,
    "aiao-s8-auto-noclip": 120.0,
    "aiao-s8-auto-sometimes": 140.0,
    "aiao-s8-do-replicate": 135.0,
    "chosen-s8": 128.0,
}


def written(tmp_path, **changes):
    """A grid with one round; ``changes`` are of the shaped runs, by variant."""
    entries = {}
    for name, ms in MS.items():
        for link, time_ms in (("unshaped, {}, round 0", 100.0), ("100mbit, {}, round 1", ms)):
            iterations = [
                {"number": n, "elapsed_ms": time_ms, "loss": 4.0 / n, "grad_norm": 1.5 * n}
                for n in (1, 2, 3)
            ]
            entry = {"round": int("round 1" in link), "iterations": iterations, "warmup": 1}
            entry |= {"link_bytes": 1e6, "other_cpus": 0.0, "failure": ""}
            if "round 1" in link:
                entry |= changes.get(name, {})
            entries[f"pp=2 x dp=2, {link.format(name)}"] = entry
    (tmp_path / "runs.json").write_text(json.dumps(entries))
    return Grid(Namespace(logs=tmp_path, rounds=1, iterations=3, real_time=False))


def test_a_line_has_the_exposure_of_the_default_and_the_ratios_of_ours(tmp_path):
    *_, line = grid.table(written(tmp_path), [LAYOUT]).splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:3] == ["pp=2 x dp=2", "100mbit", "50%"]
    assert cells[3:5] == ["200", "150 (v8-n8-do)"]
    assert cells[5:12] == ["120", "130", "125", "140", "148", "135", "-"]
    assert cells[12:16] == ["128", "-", "-", "-"]
    assert cells[16] == "1.67 / 1.54 / 1.60 / 1.43 / 1.35 / 1.48 / 1.56"
    assert cells[17] == "1.25 / 1.15 / 1.20 / 1.07 / 1.01 / 1.11 / 1.17"
    assert cells[18] == "1.20 / 1.30 / 1.25 / 1.40 / 1.48 / 1.35 / 1.28"


def test_a_loss_that_differs_and_a_run_that_failed_are_said(tmp_path):
    odd = {"iterations": [{"number": 1, "elapsed_ms": 1.0, "loss": 3.9}]}
    found = written(tmp_path, **{"aiao-s8-do": odd, "stock-v8-n8": {"failure": "rank 0 died"}})
    problems = list(grid._problems(found, [LAYOUT]))
    assert len(problems) == 2
    assert "aiao-s8-do, round 1: losses differ" in problems[0]
    assert problems[1] == "pp=2 x dp=2, 100mbit: stock-v8-n8: rank 0 died"


def test_half_of_the_iterations_clip_at_the_median_norm(tmp_path):
    found = written(tmp_path)
    assert found._median_norm(LAYOUT) == "3"
    other = Layout(num_ranks=2, data_parallel=4, recompute=False, rates=())
    with pytest.raises(ValueError, match=r"pp=2 x dp=4: the default's run .* says no gradient"):
        found._median_norm(other)


def test_a_pipeline_without_replicas_has_no_sync_to_split():
    job = Layout(num_ranks=4, data_parallel=1, recompute=True, rates=()).job()
    assert [v.name for v in grid.chosen(job) if not v.is_stock] == ["aiao-s4-do", "aiao-s4"]


def test_cells_are_chosen_by_layout_and_rate():
    layout = Layout(num_ranks=2, data_parallel=2, recompute=True, rates=("90mbit", "100mbit"))
    assert grid.wanted(layout, [""]) == layout.rates
    assert grid.wanted(layout, ["dp=2, recompute, 100mbit"]) == ("100mbit",)
    assert grid.wanted(layout, ["dp=2, 100mbit"]) == ()


def test_a_layout_that_is_slowed_down_has_slower_layers_and_links_and_a_key_of_its_own():
    slower = replace(LAYOUT, slow_down=2)
    assert slower.layer_ms == (2 * LAYOUT.layer_ms[0], 2 * LAYOUT.layer_ms[1])
    assert slower.rate_bit_s("100mbit") == 5e7
    assert slower.rate_bit_s("unshaped") is None
    key = grid._key(slower, "100mbit", DEFAULT, 1)
    assert key == "2 times slower: pp=2 x dp=2, 100mbit, stock-default, round 1"


def test_a_link_has_room_for_the_same_bytes_at_every_rate():
    slower = replace(LAYOUT, slow_down=2)
    assert LAYOUT.link("100mbit").queue_ms == pytest.approx(10.5, abs=0.1)
    assert slower.link("100mbit").queue_ms == pytest.approx(21.0, abs=0.1)
    assert LAYOUT.link("unshaped").rate_bit_s is None


def test_no_layout_is_sped_up(capsys):
    with pytest.raises(SystemExit):
        grid.main(["--slow-down", "0.5"])
    assert "--slow-down 0.5: it is 1 or more" in capsys.readouterr().err


def test_a_cell_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        grid.main(["--only", "nowhere"])
    assert "--only nowhere: no cell has that in its name" in capsys.readouterr().err


def test_bounds_stand_beside_what_was_measured(tmp_path):
    slow = {"iterations": [{"number": n, "elapsed_ms": 9000.0, "loss": 4.0 / n} for n in (1, 2, 3)]}
    found = written(tmp_path, **dict.fromkeys(MS, slow))
    *_, line = grid.bounds_table(found, [LAYOUT]).splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:2] == ["pp=2 x dp=2, 100mbit", "9000"]
    free_ms, clipped_ms = float(cells[2]), float(cells[6])
    # Eight layers per rank take 288 ms each, and the last rank begins one forward later.
    assert 8 * 8 * 36 < free_ms <= clipped_ms < 9000
    assert cells[3] == f"{9000 / free_ms:.2f}"
    assert cells[4:6] == ["-", "-"]
    assert cells[8:] == ["9000", "1.00"]

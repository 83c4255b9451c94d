import re
import sys
from pathlib import Path

import pytest

from megatron.fold3d.commands.pictures import NO_PICTURE
from tests.commands.traces import write_traces

ARGUMENTS = """
------------------------ arguments ------------------------
  global_batch_size ............................... 16
  num_layers ...................................... 8
  seed ............................................ 1234
"""
LINE = (
    " [2026-11-21 02:14:45] iteration {number:8d}/      20 | consumed samples: {samples:12d} | "
    "elapsed time per iteration (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): 100.5 | "
    "learning rate: 1.000000E-04 | global batch size:    16 | lm loss: {loss:.6E} | "
    "loss scale: 1.0 | grad norm: 2.217 | number of skipped iterations:   0 |\n"
)
# The path of each line.
LOSSES = re.compile(r'<g id="[A-Z]+ \w+ over [\w ]+">\s*<path d="([^"]*)"')


def log(ms: float, iterations: range = range(1, 21), worse: float = 0.0) -> str:
    """A log whose first three iterations are slow, as those of a real run are."""
    return "".join(
        LINE.format(
            number=n,
            samples=16 * n,
            ms=ms * (3 if n <= 3 else 1 + 0.01 * (n % 3)),
            loss=10 / n + worse * (n > 10),
        )
        for n in iterations
    )


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    stock, aiao = tmp_path / "stock.log", tmp_path / "aiao.log"
    stock.write_text(log(1500.0))
    aiao.write_text(log(1000.0))
    return stock, aiao


def test_the_ratio_is_of_throughputs_after_warmup(fold3d, runs: tuple[Path, Path]):
    assert fold3d.out("compare {} {}".format(*runs)).splitlines() == [
        "         ms per iteration (quartiles)  samples/s  model TFLOP/s per GPU  "
        "                  B aiao is (95% CI)",
        "A stock              1515 (1500-1530)      10.55                  100.5  "
        "50.0% faster (48.5% to 51.5% faster)",
        "B aiao               1010 (1000-1020)      15.83                  100.5",
        "B aiao is 50.0% faster than A stock, 95% CI 48.5% to 51.5% faster (bootstrap)",
        "",
        "loss: equal in every digit in 20 of 20 iterations",
        "",
        "no trace of A stock and B aiao: where the time went shows with --trace DIR",
    ]


def test_iterations_in_which_a_run_chooses_its_schedule_do_not_count(fold3d, runs):
    stock, auto = runs
    chosen = "--schedule auto measured F 1 ms\n  1f1b  1 s  1 s  kept after 12 iterations\n"
    tried, kept = log(3000.0, range(101, 113)), log(1000.0, range(113, 121))
    auto.write_text(tried + chosen + kept)
    stock.write_text(log(1500.0, range(101, 121)))
    code, out, err = fold3d(f"compare {stock} {auto}")
    assert (code, err) == (
        0,
        "B aiao is timed from iteration 113 on: --schedule auto chose until then\n",
    )
    assert "B aiao is 50.0% faster than A stock" in out


def test_losses_that_part_are_told_with_the_iteration_and_by_how_much(fold3d, runs):
    stock, aiao = runs
    aiao.write_text(log(1000.0, worse=0.1))
    _, out, _ = fold3d(f"compare {stock} {aiao}")
    assert "equal in every digit in 10 of 20 iterations; first apart in iteration 11, by" in out
    losses = fold3d.json(f"compare {stock} {aiao}")["losses"]
    assert losses["largest"] == pytest.approx(0.1 / (10 / 20), rel=1e-5)


@pytest.mark.parametrize("folder", ["aiao", "aiao/trace"])
def test_logs_are_found_beside_a_folder_of_traces(fold3d, tmp_path: Path, folder: str):
    stock, traces = tmp_path / "stock.log", tmp_path / folder
    stock.write_text(log(1500.0))
    write_traces(traces)
    beside = tmp_path / ("aiao.out" if folder == "aiao" else "aiao/run.log")
    beside.write_text(log(1000.0))
    code, out, _ = fold3d(f"compare {stock} {traces}")
    assert code == 0
    assert "50.0% faster" in out
    beside.unlink()
    (tmp_path / "aiao-2.out").write_text(log(1000.0))  # another run's
    assert "no log of" in fold3d(f"compare {stock} {traces}")[1]


def test_folders_hold_logs_of_several_starts_and_traces(fold3d, tmp_path: Path):
    """A run that was stopped after iteration 12 went on from its checkpoint of iteration 8."""
    for name, ms, slower in (("stock", 1500.0, 1.5), ("aiao", 1000.0, 1.0)):
        write_traces(tmp_path / name / "trace", slower=slower)
        (tmp_path / name / "1.log").write_text(log(ms, range(1, 13), worse=9.0))
        (tmp_path / name / "2.log").write_text(log(ms, range(9, 21)))
    out = fold3d.out(f"compare {tmp_path}/stock {tmp_path}/aiao")
    assert "equal in every digit in 20 of 20 iterations" in out
    table = [line.split() for line in out.splitlines()[-4:]]
    assert table[0] == ["ms", "forward", "backward", "bubble", "DP.sync", "PP.sync", "iteration"]
    assert [row[:2] for row in table[1:]] == [["A", "stock"], ["B", "aiao"], ["B", "-"]]
    assert table[1][2:4] == ["144", "288"]
    assert table[3][3:5] == ["-48", "-96"]


def test_traces_alone_are_compared_too(fold3d, tmp_path: Path):
    write_traces(tmp_path / "a")
    write_traces(tmp_path / "b", "interleaved")
    out = fold3d.out(f"compare {tmp_path}/a {tmp_path}/b")
    assert "no log of A a and B b: speed and losses are not compared" in out
    assert "B - A" in out


def test_a_restarted_iteration_counts_as_it_went_the_last_time(fold3d, runs):
    stock, aiao = runs
    aiao.write_text(log(9000.0, range(1, 13)) + log(1000.0))
    result = fold3d.json(f"compare {stock} {aiao}")
    assert result["ratio"]["value"] == pytest.approx(1.5)
    assert result["runs"][1]["iterations"] == 20


@pytest.mark.processes  # matplotlib lists the system's fonts once
def test_the_plot_shows_both_runs_over_iterations_and_over_time(fold3d, runs, tmp_path: Path):
    svg, again = tmp_path / "losses.svg", tmp_path / "again.svg"
    for file in (svg, again):
        assert fold3d("compare {} {} --svg {}".format(*runs, file))[0] == 0
    text = svg.read_text()
    ends = [float(path.split()[-2]) for path in LOSSES.findall(text)]
    assert ends[0] == ends[1]  # as many iterations
    assert ends[3] < ends[2]  # in less time
    assert again.read_text() == text
    assert not re.search(r"<script|<image|@import|url\(['\"]?http", text)


def test_without_matplotlib_there_is_no_plot(fold3d, tmp_path: Path, monkeypatch):
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    arms(tmp_path, {"given": (True,), "ours": (True,)})
    code, out, err = fold3d(f"compare {tmp_path}")
    assert (code, err) == (0, f"{NO_PICTURE}\n")
    assert "% faster than A given, 95% CI" in out
    said = fold3d.refusal(f"compare {tmp_path} --svg {tmp_path}/a.svg")
    assert said == f"fold3d compare: --svg: {NO_PICTURE}\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--warmup 20", "A stock ends with iteration 20, and the first 20 are not timed; give a"),
        ("--warmup -1", "--warmup -1: it is zero or more"),
        (
            "--timelines a.svg",
            "--timelines: no trace of A stock and B aiao; train with --trace DIR",
        ),
    ],
)
def test_mistakes_end_in_one_message(fold3d, runs, options: str, message: str):
    assert message in fold3d.refusal("compare {} {} {}".format(*runs, options))


def test_a_path_that_is_no_run_is_refused(fold3d, runs, tmp_path: Path):
    stock, _ = runs
    other = tmp_path / "notes.log"
    other.write_text("nothing\n")
    for path in (other, tmp_path / "nowhere"):
        assert str(path) in fold3d.refusal(f"compare {stock} {path}")


def test_both_pipelines_are_drawn_on_one_time_axis(fold3d, tmp_path: Path):
    write_traces(tmp_path / "stock", "interleaved", slower=2.0)
    write_traces(tmp_path / "aiao")
    svg = tmp_path / "pipelines.svg"
    fold3d.out(f"compare {tmp_path}/stock {tmp_path}/aiao --timelines {svg}")
    words = re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text())
    captions = [word for word in words if "ms per iteration" in word]
    totals = [float(word.split()[0]) for word in captions]
    assert totals[0] > totals[1]
    shares = "bubble X%, exposed DP.sync X%, PP.sync X%".replace("X", r"\d+\.\d")
    assert re.fullmatch(rf"\d+ ms per iteration: {shares}", captions[0])
    assert [word for word in words if word in ("A stock", "B aiao")] == ["A stock", "B aiao"]


@pytest.mark.parametrize(
    ("good", "bad"), [("1010.0", "1.0.1.0"), ("E-01", "E-0x"), ("1010.0", "0.0")]
)
def test_a_line_whose_numbers_are_none_is_left_out(fold3d, runs, good: str, bad: str):
    stock, aiao = runs
    lines = aiao.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if i > 10 and good in line)
    lines[at] = lines[at].replace(good, bad)
    aiao.write_text("".join(lines))
    said = "equal in every digit in 19 of 19 iterations"
    assert said in fold3d.out(f"compare {stock} {aiao}")


def test_iterations_of_unknown_size_are_compared_one_by_one(fold3d, runs):
    stock, aiao = runs
    aiao.write_text(aiao.read_text().replace("global batch size:    16", "", 10))
    assert "B aiao is 50.0% faster than A stock" in fold3d.out(f"compare {stock} {aiao}")


def test_a_run_compared_with_itself_keeps_its_name(fold3d, runs):
    out = fold3d.out(f"compare {runs[0]} {runs[0]}")
    assert "A stock" in out
    assert "B stock" in out


def test_of_three_runs_the_last_is_judged_by_the_fastest_of_the_others(fold3d, tmp_path: Path):
    line = "compare"
    for name, ms in (("default", 2000.0), ("tuned", 1500.0), ("auto", 1000.0)):
        (tmp_path / f"{name}.log").write_text(log(ms))
        line += f" {tmp_path}/{name}.log"
    lines = fold3d.out(line).splitlines()
    assert lines[1].endswith("  100.0% faster (98.0% to 102.0% faster)")
    assert lines[2].endswith("  50.0% faster (48.5% to 51.5% faster)")
    assert "C auto is 50.0% faster than B tuned, 95% CI 48.5% to 51.5% faster" in lines[4]
    assert "loss: equal in every digit in 20 of 20 iterations" in lines
    result = fold3d.json(line)
    assert [ratio["value"] for ratio in result["ratios"]] == pytest.approx([2.0, 1.5])
    assert result["verdict"] in lines[4]


def test_arms_of_one_job_are_judged_by_stock_in_the_same_layout(fold3d, tmp_path: Path):
    arms = {"1-yours": 3000.0, "2-stock-same-layout": 1500.0, "3-stock-any-layout": 1200.0}
    for name, ms in (arms | {"4-auto": 1000.0}).items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.log").write_text(log(ms))
        (tmp_path / name / "flags").write_text("--lr\n1\n")
    _, out, _ = fold3d(f"compare {tmp_path}")
    lines = out.splitlines()
    assert lines[-1] == f"flags of D auto, the fastest {tmp_path}/4-auto/flags"
    names = ["A yours", "B stock, same layout", "C stock, any layout", "D auto"]
    assert [line.partition("  ")[0] for line in lines[1:5]] == names
    assert lines[5].startswith("D auto is 50.0% faster than B stock, same layout, 95% CI ")


def test_where_the_interval_contains_one_no_difference_is_shown(fold3d, runs):
    stock, aiao = runs
    aiao.write_text(log(1500.0))
    verdict = "No difference shown between B aiao and A stock: 0.0% faster, 95% CI 1.0% slower to"
    assert verdict in fold3d(f"compare {stock} {aiao}")[1]
    aiao.write_text(log(1600.0))
    verdict = "B aiao is 6.2% slower than A stock"
    assert verdict in fold3d(f"compare {stock} {aiao}")[1]


def test_ranks_that_share_a_machine_get_no_verdict(fold3d, tmp_path: Path):
    for name, ms in (("stock", 1000.0), ("aiao", 1500.0)):
        write_traces(tmp_path / name, shares_cores=name == "aiao")
        (tmp_path / name / "run.log").write_text(log(ms))
    _, out, _ = fold3d(f"compare {tmp_path}/stock {tmp_path}/aiao")
    said = "No verdict: ranks shared the cores of one machine, without a network between"
    assert said in out.splitlines()
    assert "slower than" not in out


def test_terminal_picture_and_page_have_one_verdict(fold3d, tmp_path: Path):
    for name, ms in (("default", 2000.0), ("tuned", 1500.0), ("auto", 1000.0)):
        order = "aiao" if name == "auto" else "interleaved"
        write_traces(tmp_path / name, order, slower=ms / 1e3)
        (tmp_path / name / "run.log").write_text(log(ms).replace("TFLOP/s/GPU): 100.5", "-"))
    svg, html = tmp_path / "all.svg", tmp_path / "all.html"
    paths = " ".join(f"{tmp_path}/{name}" for name in ("default", "tuned", "auto"))
    out = fold3d.out(f"compare {paths} --timelines {svg} --html {html}")
    verdict = out.splitlines()[4].removesuffix(" (bootstrap)")
    assert verdict.startswith("C auto is 50.0% faster than B tuned")
    assert "TFLOP/s" not in out
    page = html.read_text()
    for text in (svg.read_text(), page):
        assert f"<title>{verdict}</title>" in text
    assert "<td>50.0% faster (48.5% to 51.5% faster)</td>" in page
    assert "Loss: equal in every digit in 20 of 20 iterations" in page
    assert out.splitlines()[-2:] == [f"timelines  {svg}", f"page       {html}"]
    table = [line.split()[:3] for line in out.splitlines()[-5:-3]]
    assert table[0] == ["C", "-", "A"]
    assert table[1] == ["C", "-", "B"]


def arms(folder: Path, rounds: dict[str, tuple[bool, ...]]) -> None:
    """Write runs of several rounds, of which each is finished or not."""
    for name, finished in rounds.items():
        for number, is_finished in enumerate(finished, 1):
            place = folder / name / f"round-{number}"
            place.mkdir(parents=True)
            file = "train.log" if is_finished else "train.part"
            (place / file).write_text(log(1000.0 * (2 if name == "given" else 1) + number))


@pytest.mark.processes
def test_a_folder_of_runs_is_compared_with_all_their_rounds(fold3d, tmp_path: Path):
    arms(tmp_path, {"given": (True, True), "ours": (True, True)})
    out = fold3d.out(f"compare {tmp_path}")
    assert "B ours is 99." in out
    assert out.splitlines()[-1] == f"losses     {tmp_path}/losses.svg"
    assert [run["iterations"] for run in fold3d.json(f"compare {tmp_path}")["runs"]] == [20, 20]


@pytest.mark.processes
def test_rounds_that_have_not_finished_are_named_with_how_to_go_on(fold3d, tmp_path: Path):
    arms(tmp_path, {"given": (True, False), "ours": (True, True), "search": (False, False)})
    (tmp_path / "resume").write_text("sbatch it\n")
    told = "not finished: given/round-2, search/round-1, search/round-2; to go on: sbatch it"
    code, out, err = fold3d(f"compare {tmp_path}")
    assert code == 0
    assert f"{tmp_path}: {told}" in err
    assert "% faster than A given, 95% CI" in out
    assert "search" not in out


def test_a_folder_without_finished_runs_says_which_are_missing(fold3d, tmp_path: Path):
    arms(tmp_path, {"given": (True,), "ours": (False,)})
    told = f"{tmp_path}: not finished: ours/round-1; to go on: train them to their end"
    assert told in fold3d.refusal(f"compare {tmp_path}")
    (tmp_path / "ours/round-1/train.log").write_text(log(1.0, range(1, 20)))  # of 20
    assert "not finished: ours/round-1" in fold3d(f"compare {tmp_path}")[2]
    told = "0 runs in it; give two runs, or a folder of them"
    assert told in fold3d.refusal(f"compare {tmp_path}/given/round-1")


@pytest.mark.parametrize(
    ("flag", "what"), [("num_layers", "model"), ("global_batch_size", "batch"), ("seed", "seed")]
)
def test_runs_of_another_job_are_refused_by_name(fold3d, runs, flag: str, what: str):
    stock, aiao = runs
    stock.write_text(ARGUMENTS + log(1500.0))
    aiao.write_text(re.sub(rf"({flag} \.+) \d+", r"\1 4", ARGUMENTS) + log(1000.0))
    err = fold3d.refusal(f"compare {stock} {aiao}")
    assert f"B aiao trained another {what} than A stock: {flag} 4, not " in err
    assert "compare runs of one model, batch and seed" in err


def test_memory_and_what_is_recomputed_come_from_the_trace(fold3d, tmp_path: Path):
    for name, ms in (("stock", 1500.0), ("aiao", 1000.0)):
        write_traces(tmp_path / name, flops=3e12, recomputed=1e12)
        (tmp_path / name / "run.log").write_text(log(ms))
    line = f"compare {tmp_path}/stock {tmp_path}/aiao"
    titles, row = fold3d(line)[1].splitlines()[:2]
    for title in ("model TFLOP/s per GPU", "hardware TFLOP/s", "GPU GiB", "host GiB"):
        assert title in titles
    assert row.split()[5:9] == ["100.5", "134", "3", "2"]
    assert fold3d.json(line)["runs"][0]["gpu_gib"] == 3


@pytest.mark.processes
def test_every_run_has_a_line_of_its_own_in_the_picture(fold3d, tmp_path: Path):
    for number in range(30):
        (tmp_path / f"run{number:02}").mkdir()
        (tmp_path / f"run{number:02}/a.log").write_text(log(1000.0 + number))
    assert "AD run29" in fold3d.out(f"compare {tmp_path}")
    assert len(LOSSES.findall((tmp_path / "losses.svg").read_text())) == 2 * 30

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.fold3d.predict.cost_model.model_shape import model_shape
from tests.commands.traces import write_traces


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_traces(tmp_path)
    return tmp_path


def test_a_trace_becomes_table_ii_a_page_and_a_perfetto_file(fold3d, folder: Path):
    assert fold3d.out(f"trace {folder}").splitlines() == [
        "aiao: 2 ranks, 2 segments, 8 micro-batches",
        "",
        "ms            forward  backward  bubble  DP.sync  PP.sync  iteration",
        "measured           96       192      17       51        4        360",
        "of iteration    26.7%     53.3%    4.7%    14.2%     1.1%     100.0%",
        "simulated          96       192   16.37    48.17        5      357.5",
        "of iteration    26.9%     53.7%    4.6%    13.5%     1.4%     100.0%",
        "",
        "GPU memory   3.0 GiB at peak, of the fullest GPU",
        "host memory  2.0 GiB at peak, of the largest process",
        "",
        f"page      {folder / 'timeline.html'}",
        f"Perfetto  {folder / 'perfetto.json'}",
    ]
    html = (folder / "timeline.html").read_text()
    data = json.loads(re.search(r'<script id="data".*?>(.*?)</script>', html)[1])
    assert [view["name"] for view in data["views"]] == ["measured", "simulated"]
    assert json.loads((folder / "perfetto.json").read_text())["traceEvents"]


def test_the_page_names_the_context_parallel_rank_where_there_are_several(fold3d, folder: Path):
    page = folder / "timeline.html"
    fold3d(f"trace {folder}")
    assert "context-parallel" not in page.read_text()
    for number in range(2):
        row = json.loads((folder / f"rank-{number:05}.json").read_text())
        row |= {"rank": number + 2, "cp_rank": 1}
        (folder / f"rank-{number + 2:05}.json").write_text(json.dumps(row))
    fold3d(f"trace {folder} --pipeline 1")
    assert "replica 0, tensor-parallel rank 0, context-parallel rank 1;" in page.read_text()


def test_a_peak_gives_utilisation(fold3d, tmp_path: Path):
    shape = model_shape("12-1024-16-512")
    write_traces(tmp_path, flops=4 * 3 * sum(shape.stage_flops(1)))
    line = f"trace {tmp_path} --peak-tflops 312"
    told = r"per GPU +[\d.]+ TFLOP/s of the model, [\d.]+ with recomputation, \d+\.\d% of peak"
    assert re.search(told, fold3d.out(line))
    measured = fold3d.json(line)["measured"]
    assert measured["utilisation"] == pytest.approx(measured["flops_per_gpu_s"] / 312e12)
    assert measured["device_bytes"] == 3 << 30


def test_a_run_without_a_gpu_has_no_flops_of_one(fold3d, tmp_path: Path):
    write_traces(tmp_path, flops=1e9)
    assert "TFLOP/s" in fold3d.out(f"trace {tmp_path}")
    for file in tmp_path.glob("rank-*.json"):
        without = re.sub(r'"gpu_memory_bytes":\d+', '"gpu_memory_bytes":null', file.read_text())
        file.write_text(without)
    assert "TFLOP/s" not in fold3d.out(f"trace {tmp_path}")
    assert "TFLOP/s" not in (tmp_path / "timeline.html").read_text()


def test_counters_of_ranks_are_shown(fold3d, tmp_path: Path):
    counts = {"offloaded_bytes": 3 << 28, "deferred_grad_sync_share": 0.3}
    write_traces(tmp_path, counts=counts)
    _, out, _ = fold3d(f"trace {tmp_path}")
    assert "offloaded    0.75 GiB per iteration, by the process that offloads most\n" in out
    assert "deferred     30.0% of the gradients, reduced behind the next forward\n" in out
    html = (tmp_path / "timeline.html").read_text()
    assert "<th>offloaded GiB</th><th>deferred</th>" in html
    assert "<td>0.75</td><td>30.0%</td>" in html
    measured = fold3d.json(f"trace {tmp_path}")["measured"]
    assert (measured["offloaded_bytes"], measured["deferred_share"]) == (3 << 28, 0.3)


def test_weight_gradients_that_were_delayed_are_shown_and_simulated(fold3d, tmp_path: Path):
    write_traces(tmp_path, delayed=[1])
    measured, simulated = fold3d.json(f"trace {tmp_path}").values()
    assert measured["backward_s"] == pytest.approx(8 * 2 * 0.012)
    assert simulated["total_s"] == pytest.approx(measured["total_s"], rel=0.05)
    html = (tmp_path / "timeline.html").read_text()
    assert '"2W7"' in html
    assert '"weight gradient 7"' in (tmp_path / "perfetto.json").read_text()


def test_a_stock_run_is_simulated_in_the_order_that_was_seen(fold3d, tmp_path: Path):
    write_traces(tmp_path, "interleaved", with_plan=False)
    measured, simulated = fold3d.json(f"trace {tmp_path}").values()
    assert simulated["total_s"] == pytest.approx(measured["total_s"], rel=0.05)


def test_costs_of_ones_own_are_simulated_instead(fold3d, folder: Path, tmp_path: Path):
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"forward_s": [0.003] * 4, "backward_s": [0.006] * 4}))
    found = fold3d.json(f"trace {folder} --costs {costs}")
    assert found["simulated"]["forward_s"] == pytest.approx(0.048)


def test_files_go_where_they_are_wanted(fold3d, folder: Path, tmp_path: Path):
    html, chrome = tmp_path / "a.html", tmp_path / "b.json"
    fold3d(f"trace {folder} --html {html} --chrome {chrome}")
    assert html.exists()
    assert chrome.exists()
    assert not (folder / "timeline.html").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--pipeline 1", "found no pipeline 1; the last one is 0"),
        ("--pipeline -1", "--pipeline -1: the first is 0"),
        ("--peak-tflops inf", "--peak-tflops inf: it is above zero"),
        ("--costs {}/two.json", "two.json: found 2 numbers in forward_s; a plan of 4 stages"),
        ("--peak-tflops 312", "--peak-tflops 312.0: the trace has no GPU, or a model whose FLOPs"),
        ("--html /nowhere/a.html", "/nowhere/a.html: No such file or directory"),
    ],
)
def test_mistakes_end_in_one_message(fold3d, folder: Path, options: str, message: str):
    (folder / "two.json").write_text('{"forward_s": [1, 1], "backward_s": [2, 2]}')
    assert message in fold3d.refusal(f"trace {folder} {options.format(folder)}")


def test_a_folder_without_traces_says_how_to_make_them(fold3d, tmp_path: Path):
    said = f"holds no rank-*.json; train with --trace {tmp_path}"
    assert said in fold3d.refusal(f"trace {tmp_path}")
    said = f"{tmp_path}/nowhere: there is no such folder; give a folder that --trace wrote"
    assert said in fold3d.refusal(f"trace {tmp_path}/nowhere")


def _replaced(pattern: str, by: str) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, by, text)


@pytest.mark.parametrize("command", ["trace {}", "compare {} {}"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text: text[:1000], "cut off, or not a trace: Expecting"),
        (
            _replaced('"num_segments":2', '"num_segments":4'),
            "is of another job than rank-00000.json: num_segments 4, not 2",
        ),
        (
            _replaced('"start_s":1000000000.0', '"start_s":1000003600.0'),
            "another job than rank-00000.json: their iterations 4 are 3600 s apart",
        ),
        (_replaced('"pp_rank":1,', ""), "not a trace: RankTrace.__init__() missing"),
        (lambda _: "[" * 100_000, "not a trace: nested too deeply"),
        (lambda _: "null", "not a trace: found no version in it"),
        (_replaced('"version":2', '"version":3'), "found version 3, this is for 2"),
        (_replaced('"num_ranks":2', '"num_ranks":0'), "found num_ranks=0; it is above zero"),
        (_replaced('"pp_rank":1', '"pp_rank":2'), "found pp_rank=2 of num_ranks=2"),
        (_replaced('"num_segments":2', '"num_segments":1000000000'), "; at most 10000"),
        (_replaced('"schedule":"aiao"', '"schedule":5'), "found schedule=5; it is text"),
        (_replaced('"iteration":5', '"iteration":4'), "found iterations [4, 4]; each is there"),
        (_replaced(r'"end_s":[\d.]+', '"end_s":NaN'), "found end_s=nan; it is a number"),
        (_replaced('"pp_rank":1', f'"pp_rank":{10**400}'), "it is a number"),
        (
            _replaced('"gpu_memory_bytes":\\d+', '"gpu_memory_bytes":"x"'),
            "found gpu_memory_bytes='x'; it is a number",
        ),
        (_replaced('"counts":{}', '"counts":{"a":null}'), "found None in iteration 4"),
        (_replaced('"1F0",[\\d.]+', '"1F0","x"'), "found ['1F0', 'x'"),
        (_replaced('"compute"', '"tea"'), "found an event of kind 'tea'; known are"),
    ],
)
def test_a_bad_file_of_a_rank_is_named(fold3d, folder: Path, command: str, spoil, message: str):
    bad = folder / "rank-00001.json"
    bad.write_text(spoil(bad.read_text()))
    err = fold3d.refusal(command.format(folder, folder))
    assert f"{bad}" in err
    assert message in err


def test_a_file_of_a_rank_that_is_no_text_is_named(fold3d, folder: Path):
    bad = folder / "rank-00001.json"
    bad.write_bytes(b"\xff\xfe")
    assert fold3d.refusal(f"trace {folder}") == f"fold3d trace: {bad}: not text in UTF-8\n"


def test_a_trace_that_claims_a_billion_ranks_ends_at_once(fold3d, tmp_path: Path):
    write_traces(tmp_path, with_plan=False)
    for file in tmp_path.glob("rank-*.json"):
        file.write_text(file.read_text().replace('"num_ranks":2', '"num_ranks":1000000000'))
    said = "found traces of 2 ranks, none of pipeline rank 2; collect"
    assert said in fold3d.refusal(f"trace {tmp_path}")


@pytest.mark.parametrize(
    ("action", "in_plan", "message"),
    [
        ("999999999F0", False, "found actions of 500000000 segments in a trace of 2; trace again"),
        ("0F999999999", False, "not simulated: .* forwards; trace whole iterations"),
        ("999999999F0", True, "not simulated: .* forwards; trace whole iterations"),
        ("0F999999999", True, "not simulated: .* forwards; trace whole iterations"),
    ],
)
def test_a_trace_that_claims_a_billion_actions_costs_no_more_than_another(
    fold3d, tmp_path, action, in_plan, message
):
    write_traces(tmp_path, with_plan=in_plan)
    for file in tmp_path.glob("rank-*.json"):
        trace = json.loads(file.read_text())
        if in_plan:
            trace["plan"] = action
        else:
            trace["iterations"][0]["events"][0][0] = action
        file.write_text(json.dumps(trace))
    code, _, err = fold3d(f"trace {tmp_path}")
    assert re.search(message, err), err
    assert err.count("\n") == 1
    assert code == (0 if "not simulated" in message else 2)


def test_the_page_runs_nothing_that_a_trace_contains(fold3d, tmp_path: Path):
    attack = "</script><!--<script>alert(1)</script><img src=x onerror=alert(2)>\"'&"
    write_traces(tmp_path, with_plan=False)
    for file in tmp_path.glob("rank-*.json"):
        trace = json.loads(file.read_text())
        trace["schedule"] = attack
        for row in trace["iterations"]:
            row["counts"][attack] = 1.0
            row["events"].append([attack, 0.001, 0.002, "wait"])
        file.write_text(json.dumps(trace))
    fold3d.out(f"trace {tmp_path}")
    html = (tmp_path / "timeline.html").read_text()
    assert len(re.findall("<script", html)) == len(re.findall("</script", html)) == 2
    assert "<img" not in html
    assert "<!--" not in html
    json.loads(re.search(r'<script id="data".*?>(.*?)</script>', html)[1])
    # The browser itself is told to load nothing.
    assert "default-src 'none'" in html

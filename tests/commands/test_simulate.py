import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.fold3d.commands.console import faster
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.predict.cost_model.model_shape import SHAPES
from megatron.fold3d.predict.simulator.costs import Costs

SIMULATE = "simulate --schedule aiao --pp 2 --segments 2 --microbatches 4"


def test_simulate_prints_times_exposure_and_the_grid(fold3d, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    out = fold3d.out("simulate --schedule 1f1b --pp 2 --microbatches 2 --seconds sum=1.5")
    assert (
        out
        == """\
1f1b: 2 ranks, 1 segment, 2 micro-batches
iteration         10.5 s
lower bound       7.00 s  for any order, without DP.sync: 66.7% of the iteration
with DP.sync      7.50 s, or 8.50 s if steps wait for the norm
peak activations  2 1  per rank

              forward  backward  bubble  DP.sync  PP.sync  iteration
seconds          2.00      4.00    3.00     1.50        0       10.5
of iteration    19.0%     38.1%   28.6%    14.3%     0.0%     100.0%

rank 0 | 0F0 0F1 ·   ·   0B0──── ·   0B1────
rank 1 | ·   1F0 1B0──── 1F1 1B1──── ·   ·
"""
    )


def test_the_grid_is_left_out_where_it_does_not_fit(fold3d, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "24")
    line = "simulate --schedule 1f1b --pp 8"
    assert "rank 7 |" in fold3d(f"{line} --microbatches 1")[1]
    assert "rank 7 |" not in fold3d(f"{line} --microbatches 40")[1]


def test_simulate_as_json_adds_up(fold3d):
    result = fold3d.json(f"{SIMULATE} --seconds p2p=0.1,sum=6")
    assert (result["name"], result["ranks"], result["segments"]) == ("aiao", 2, 2)
    assert result["period_s"] == result["makespan_s"]
    for row in (result["exposure"], *result["exposure_of_rank"]):
        columns = (seconds for column, seconds in row.items() if column != "total_s")
        assert sum(columns) == pytest.approx(row["total_s"])
        assert row["total_s"] == pytest.approx(result["period_s"])


def test_a_plan_file_is_simulated_like_its_schedule(fold3d, tmp_path: Path):
    path = tmp_path / "plan.txt"
    path.write_text(fold3d("plan --schedule aiao --pp 2 --segments 2 --microbatches 4")[1])
    by_name, by_file = (
        fold3d.json(f"{line} --seconds p2p=0.2,sum=3")
        for line in (SIMULATE, f"simulate --schedule plan={path}")
    )
    assert by_file["period_s"] == by_name["period_s"]
    assert by_file["exposure"] == by_name["exposure"]


def test_a_plan_that_cannot_run_is_not_simulated(fold3d, tmp_path: Path):
    path = tmp_path / "plan.txt"
    path.write_text("0F0 0SEND_F0 0RECV_B0 0B0\n1RECV_F0 1F0 1B0\n")
    code, out, err = fold3d(f"simulate --schedule plan={path}")
    assert (code, out) == (1, "")
    assert err.startswith(f"{path}: 0RECV_B0 has no 1SEND_B0 to go with it\n")


def test_simulate_reads_costs_and_draws(fold3d, tmp_path: Path):
    costs, svg = tmp_path / "costs.json", tmp_path / "aiao.svg"
    seconds = {"forward_s": [1, 1, 1, 1], "backward_s": [2, 2, 2, 2], "weight_s": [1, 1, 1, 1]}
    costs.write_text(json.dumps(seconds))
    assert fold3d.out(f"{SIMULATE} --costs {costs} --svg {svg}") == fold3d.out(SIMULATE)
    assert ">Simulated: aiao, 2 ranks, 2 segments, 4 micro-batches</text>" in svg.read_text()


def embedded(path: Path) -> dict[str, Any]:
    return json.loads(re.search(r'<script id="data".*?>(.*?)</script>', path.read_text())[1])


def test_the_page_shows_what_the_command_simulates(fold3d, tmp_path: Path):
    page = tmp_path / "page.html"
    line = f"{SIMULATE} --seconds sum=4 --schedule aiao:wgrad=behind@1 --html {page}"
    found = fold3d.json(line)
    [view] = embedded(page)["views"]
    assert view["name"] == "aiao:wgrad=behind@1"
    assert view["ends"][-1] == 1e6 * found["makespan_s"]
    assert "2W:250" in view["ranks"][0]["compute"]["word"]
    fold3d.out(f"{SIMULATE} --seconds forward=0,backward=0 --html {page}")


def test_runs_with_other_flags_stand_beside_it(fold3d, tmp_path: Path):
    page, svg = tmp_path / "page.html", tmp_path / "a.svg"
    whole = "--schedule 1f1b --segments 1 --seconds forward=2,backward=4"
    others = f"--beside '{whole}' --beside '--schedule aiao:step=next'"
    out = fold3d.out(f"{SIMULATE} --seconds sum=4 {others} --html {page} --svg {svg}")
    assert out == fold3d.out(f"{SIMULATE} --seconds sum=4")
    views = embedded(page)["views"]
    names = ["aiao", "1f1b", "aiao:step=next"]
    assert [view["name"] for view in views] == names
    assert ["2F0" in view["ranks"][0]["compute"]["word"] for view in views] == [True, False, True]
    assert [view["ranks"][0]["compute"]["end"][0] for view in views] == [1e6, 2e6, 1e6]
    assert all(f">{name}</text>" in svg.read_text() for name in names)


def test_the_page_says_what_is_simulated_and_what_is_gained_over_stock(fold3d, tmp_path: Path):
    page = tmp_path / "page.html"
    model = "--model gpt3-18b --cluster a100x64-100g --pp 4 --tp 8 --micro-batch-size 1"
    line = f"simulate --schedule aiao --segments 2 {model} --microbatches 4 --recompute full"
    others = "--beside '--schedule stock' --beside '--schedule 1f1b --segments 1'"
    found = fold3d.json(f"{line} {others} --html {page}")
    stock_s = fold3d.json(f"{line} --schedule stock")["period_s"]
    gain = faster(stock_s / found["period_s"] - 1)
    text = page.read_text()
    assert f"<b>{gain}</b><span>than stock of the same layout</span>" in text
    assert "<h1>Simulated: gpt3-18b on a100x64-100g</h1>" in text
    assert [view["name"] for view in embedded(page)["views"]][1] == "stock interleaved"
    fold3d(f"{line} --beside '--schedule 1f1b --segments 1' --html {page}")
    assert "than stock" not in page.read_text()  # ours alone


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("", "--beside '--pp 4' shows several runs in a picture; give --html FILE or "),
        ("--html a.html", "--beside '--pp 4': --pp 4 beside 2 ranks: "),
        ("--html a.html --beside '--schedule auto'", "--beside '--schedule auto': "),
        ("--html a.html --beside '--segment 1'", "did you mean --segments?"),
        ("--html a.html --beside '--seconds f=1'", "--beside '--seconds f=1': argument --seconds"),
    ],
)
def test_runs_that_cannot_stand_beside_it_are_refused(
    fold3d, options, found, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    others = options if "--beside" in options else f"{options} --beside '--pp 4'"
    assert found in fold3d.refusal(f"{SIMULATE} {others}")
    assert not [*tmp_path.iterdir()]


NESTED = '{"forward_s":' * 50_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", ": Expecting value"),
        (b"\xff\xfe", "not text in UTF-8"),
        pytest.param(NESTED.encode(), ": nested too deeply", id="nested"),
        (b"[1, 2]", " holds a list; it must hold the fields of a cost table"),
        (b'{"forward_s": [1]}', "lacks backward_s; a cost table needs backward_s, forward_s"),
        (b'{"forward_s": [1], "backward_s": [2], "f": 1}', "has unknown fields f; known are"),
        (b'{"forward_s": 1, "backward_s": 2}', "found forward_s=1; it is a list of finite"),
        (b'{"forward_s": [1], "backward_s": [2], "p2p_s": [1]}', "p2p_s=[1]; it is one number"),
        (b'{"forward_s": [1], "backward_s": [2]}', "found 1 numbers in forward_s"),
        (b'{"forward_s": [1,1,1,NaN], "backward_s": [2,2,2,2]}', "seconds are zero or more"),
        (b'{"forward_s": ["a",1,1,1], "backward_s": [2,2,2,2]}', "seconds are zero or more"),
        (b'{"forward_s": [1,1,1,-1], "backward_s": [2,2,2,2]}', "found forward_s=(1, 1, 1, -1)"),
        (b'{"forward_s": [1,1,1,1], "backward_s": [2,2,2,2], "p2p_s": NaN}', "found p2p_s=nan"),
        pytest.param(
            b'{"forward_s": [1,1,1,1' + b"0" * 400 + b'], "backward_s": [2,2,2,2]}',
            "seconds are zero or more",
            id="beyond floats",
        ),
    ],
)
def test_a_file_that_holds_no_costs_is_refused(fold3d, tmp_path: Path, content, message):
    costs = tmp_path / "costs.json"
    costs.write_bytes(content)
    err = fold3d.refusal(f"{SIMULATE} --costs {costs}")
    assert err.startswith("fold3d simulate: ")
    assert str(costs) in err
    assert message in err


def test_a_cluster_without_end_is_refused(fold3d, tmp_path: Path):
    cluster = tmp_path / "mine.toml"
    cluster.write_text("devices = " + "[" * 50_000)
    line = "simulate --schedule 1f1b --pp 4 --microbatches 8 --model gpt3-14b"
    said = fold3d.refusal(f"{line} --cluster {cluster}")
    assert f"cannot read a cluster from {cluster}: nested too deeply" in said


def test_a_model_that_does_not_fit_is_answered_with_no(fold3d):
    line = "simulate --schedule 1f1b --pp 4 --microbatches 8 --model gpt3-14b --cluster a100x32"
    line += " --tp 8 --micro-batch-size"
    code, out, err = fold3d(f"{line} 20 --transformer-impl local")
    assert code == 1
    assert "peak memory" in out
    assert err.startswith("pipeline rank 0 would hold ")
    assert err.endswith("; `fold3d search` finds sizes that fit\n")
    code, _, err = fold3d(f"{line} 18 --transformer-impl local")
    assert (code, err) == (0, "little is left of 40 GiB for CUDA, NCCL and the allocator\n")
    assert fold3d(f"{line} 20 --recompute none")[::2] == (0, "")  # fused


def test_auto_takes_the_fewest_forwards_ahead_that_take_the_least_time(fold3d):
    line = "simulate --schedule 1f1b --pp 4 --microbatches 16"
    for transfer_s, chosen in ((0, 1), (0.5, 2), (1.25, 3)):
        costed = f"{line} --seconds p2p={transfer_s} --schedule 1f1b:ahead"
        found = fold3d.json(f"{costed}=auto")
        assert found["name"] == f"1f1b:ahead={chosen}"
        times = [fold3d.json(f"{costed}={n}")["period_s"] for n in range(1, 7)]
        assert found["period_s"] == min(times) == times[chosen - 1]
        assert min(times[: chosen - 1], default=1e9) > min(times)


def test_auto_puts_weight_gradients_where_ranks_would_wait(fold3d):
    line = "simulate --pp 4 --microbatches 8 --seconds p2p=0.4 --schedule 1f1b"

    def found(more: str) -> dict:
        return fold3d.json(f"{line}{more}")

    both = found(":ahead=auto:wgrad=gaps")
    assert both["name"] == "1f1b:wgrad=gaps:ahead=2"
    assert both["period_s"] < 0.95 * found(":ahead=auto")["period_s"]
    little = found(":wgrad=gaps")
    assert max(little["peak_activations"]) == 4
    assert both["period_s"] < little["period_s"] < found("")["period_s"]
    assert found(":wgrad=gaps:held=9")["period_s"] <= little["period_s"]


def test_stocks_own_overlap_hides_all_to_alls(fold3d, tmp_path: Path):
    costs = tmp_path / "costs.json"
    costs.write_text(replace(Costs.uniform(4), ep_sync_s=(0.5,) * 4).to_json())
    line = f"{STOCK} --costs {costs}"
    plain, hidden = (fold3d.json(more)["period_s"] for more in (line, f"{line} {COMBINED}"))
    assert hidden < plain


COUNTED = (
    "simulate --schedule aiao --pp 4 --segments 5 --microbatches 16 --model gpt3-18b "
    "--cluster v100x64 --tp 8 --micro-batch-size 4"
)


def test_the_fewest_recomputed_layers_that_fit_are_found(fold3d):
    code, out, _ = fold3d(f"{COUNTED} --recompute-layers auto")
    assert code == 0
    name, *_ = out.splitlines()
    counts = name.split("--recompute-layers ")[1].split(":")[0]
    assert fold3d(f"{COUNTED} --recompute-layers {counts}") == (0, out, "")


REPLICATED = (
    "simulate --schedule aiao --pp 2 --segments 8 --microbatches 8 --model testbed "
    "--cluster testbedx4-0.125g --layer-forward-s 0.012 --fp32 --use-distributed-optimizer "
    "--transformer-impl local"
)


@pytest.mark.search
def test_replicated_segments_shorten_an_iteration_that_waits_for_all_gradients(fold3d):
    def found(more: str) -> dict[str, Any]:
        return fold3d.json(f"{REPLICATED} {more}")

    without, auto = found(""), found("--schedule aiao:optimizer=auto")
    assert auto["period_s"] < 0.98 * without["period_s"]
    segments = auto["name"].removeprefix("aiao:optimizer=replicated@")
    assert found(f"--schedule {auto['name']}")["period_s"] == auto["period_s"]
    # Of fp32 Adam's eight bytes, the half that the other replica keeps.
    more = auto["peak_bytes"][0] - without["peak_bytes"][0]
    layers = len(segments.split(","))
    assert more == pytest.approx(layers * 12 * 256**2 * 4, rel=0.1)


AUTO = "simulate --pp 2 --segments 4 --microbatches 4 --schedule auto"


@pytest.mark.search
def test_what_auto_would_try_is_told_with_what_is_expected(fold3d):
    out = fold3d.out(f"{AUTO} --seconds sum=6,p2p=0.4")
    title, stock, *tried = out.splitlines()
    assert title == "auto: 2 ranks, 4 segments, 4 micro-batches"
    assert re.fullmatch(r"stock's order  interleaved +70.6 s", stock)
    assert [":step=next" in line for line in tried] == [True, False]
    found = fold3d.json(f"{AUTO} --seconds sum=6,p2p=0.4")
    assert found["stock"] == {"schedule": "interleaved", "seconds": pytest.approx(70.6)}
    for line, one in zip(tried, found["tries"], strict=True):
        assert line.split("  ")[-1] == f"{70.6 / one['seconds'] - 1:.1%} faster"
        assert one["schedule"] in line


@pytest.mark.search
@pytest.mark.stress
def test_auto_replicates_segments_of_a_distributed_optimizer(fold3d):
    line = REPLICATED.replace("--schedule aiao", "--schedule auto")
    chosen = fold3d.json(f"{REPLICATED} --schedule aiao:optimizer=auto")
    early, late = tried = fold3d.json(line)["tries"]
    replicated = [Choice.parse(t["schedule"], 8).where(optimizer="replicated") for t in tried]
    assert all(replicated)
    # Reductions to shards start between weight gradients, or all-reduces alone.
    behind = Choice.parse(late["schedule"], 8).where(wgrad="behind")
    assert {*behind} <= {*replicated[1]}
    assert early["seconds"] < late["seconds"] < 0.98 * chosen["period_s"]
    # The same flags take the same time.
    for one in tried:
        again = fold3d.json(f"{REPLICATED} --schedule {one['schedule']}")
        assert again["period_s"] == pytest.approx(one["seconds"], rel=1e-9)


@pytest.mark.search
@pytest.mark.stress
def test_auto_tries_with_more_replicas_what_it_tries_with_two(fold3d):
    line = REPLICATED.replace("--schedule aiao", "--schedule auto").replace("x4-", "x8-")
    tried = fold3d.json(line)["tries"]
    assert any(":optimizer=replicated" in one["schedule"] for one in tried)


@pytest.mark.search
@pytest.mark.parametrize(
    "more", ["--context-parallel-size 2", "--tensor-model-parallel-size 2 --num-experts 2"]
)
def test_ranks_that_reduce_as_replicas_do_count_as_such(fold3d, more: str):
    line = f"{AUTO} --seconds sum=6,p2p=0.4 -- --deterministic-mode"
    for flags, defers in (("", True), (f"{more} --expert-tensor-parallel-size 1", False)):
        tried = fold3d.json(f"{line} {flags}")["tries"]
        assert any(":step=next" in one["schedule"] for one in tried) is defers


@pytest.mark.search
@pytest.mark.parametrize(("tp", "defers"), [(1, True), (2, False)])
def test_auto_defers_no_dp_sync_where_one_queue_holds_all_streams(fold3d, tp: int, defers: bool):
    line = "simulate --schedule auto --pp 2 --segments 3 --microbatches 16 --micro-batch-size 4"
    job = f"--model 12-1024-16-512 --cluster a100x16-50g --tp {tp}"
    tried = fold3d.json(f"{line} {job}")["tries"]
    assert any(":step=next" in one["schedule"] for one in tried) == defers


def test_where_nothing_waits_auto_tries_nothing(fold3d):
    _, out, _ = fold3d("simulate --schedule auto --pp 1 --microbatches 4")
    assert out.splitlines()[-1] == "nothing that fits is predicted to be faster"


SPLIT = (
    "simulate --schedule 1f1b --pp 4 --microbatches 32 --model 48-1536-16 --cluster rtx3090x4 "
    "--recompute full"
)


def test_stages_without_layers_are_predicted(fold3d):
    line = "simulate --schedule 1f1b --pp 4 --microbatches 8 --model 6-1024-16 --cluster a100x4-25g"
    found = fold3d.json(f"{line} --layers 0,3,3,0")
    assert found["layers"] == [0, 3, 3, 0]
    # The first rank computes nothing, and its iteration is as long as the others'.
    assert found["period_s"] >= found["lower_bound_s"] > 0
    assert found["exposure_of_rank"][0]["forward_s"] == 0
    assert "'E|t*3|t*3|L'" in fold3d(f"{line} --layers 0,3,3,0")[1]
    # Nothing is recomputed where there are no layers.
    few, none = (
        fold3d.json(f"{line} --layers 0,3,3,0 --recompute {how}")["peak_bytes"][3]
        for how in ("full", "none")
    )
    assert few == none
    fold3d.out(f"{line} --layers 0,3,3,0 --recompute full --recompute-layers 0,1,3,0")


IN_QUEUES = (
    "simulate --schedule aiao --pp 1 --segments 4 --microbatches 8 "
    "--seconds forward=20,backward=60,sum=640"
)
NEXT = "--schedule aiao:step=next"
OF_18B = (
    "simulate --schedule aiao --pp 4 --segments 5 --microbatches 16 --model gpt3-18b "
    "--cluster a100x128-200g --tp 8 --micro-batch-size 4 --recompute full"
)
SHARE = f"{OF_18B} --cuda-connections 1 {NEXT}:share=0.8"
OF_14B = (
    "simulate --schedule aiao --pp 4 --segments 2 --microbatches 4 --model gpt3-14b --tp 2 "
    "--recompute full"
)
TESTBED = (
    "simulate --schedule 1f1b --pp 2 --microbatches 2 --model testbed --cluster testbedx4 --fp32"
)
SMALL = "simulate --schedule 1f1b --pp 2 --microbatches 8 --model 6-1024-16 --cluster a100x8-25g"
MAPPED = "--use-tp-pp-dp-mapping"
SLICES = f"{NEXT}:share=0.5 --grad-sync-launches 137"
LESS, MORE, MUCH = 1 - 1e-9, 1 + 1e-9, 1e9


@pytest.mark.parametrize(
    ("line", "more", "what", "least", "most"),
    [
        # A measured layer replaces the rate of the GPUs.
        (TESTBED, "--layer-forward-s 0.006", "exposure.forward_s", LESS, MORE),
        (TESTBED, "--layer-forward-s 0.012", "exposure.forward_s", 2 * LESS, 2 * MORE),
        # Gradients of 16 bits.
        (SMALL, "--grad-reduce-in-bf16", "period_s", 0, LESS),
        (SMALL, "--grad-reduce-in-bf16", "peak_bytes.0", 0, LESS),
        # With Megatron's flag pipeline ranks are neighbours, inside the node.
        (f"{OF_14B} --cluster a100x64-100g", MAPPED, "exposure.p2p_s", 0, LESS),
        (f"{OF_14B} --cluster a100x64-100g", MAPPED, "exposure.grad_sync_s", 1, MUCH),
        # Of 64 GPUs the slowest is 2.37 deviations late.
        (f"{OF_14B} --cluster h100x64", "--straggler-sigma 0.02", "period_s", 1.01, 1.048),
        # One hardware queue: what DP.sync launches, whole and in buckets.
        (IN_QUEUES, "--cuda-connections 1", "period_s", 1, 1),
        (IN_QUEUES, "--cuda-connections 8 --grad-sync-launches 7", "period_s", 0, LESS),
        (IN_QUEUES, "--cuda-connections 1 --grad-sync-launches 7", "period_s", 1.25, MUCH),
        (f"{IN_QUEUES} --cuda-connections 1", SLICES, "period_s", 1.35, MUCH),
        (f"{IN_QUEUES} --cuda-connections 1", f"{NEXT}:share=0.75:slices=on", "period_s", 0, 0.88),
        # It costs a model little, since training heeds it: a plan has slices, 134 not in a row.
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in (
                (f"{OF_18B} --cuda-connections 8", "--cuda-connections 1", "period_s", 0, 1.03),
                (SHARE, f"{NEXT}:share=0.8:slices=on", "period_s", 1, 1),
                (SHARE, "--grad-sync-launches 134", "period_s", 1.5, MUCH),
            )
        ),
    ],
)
def test_an_option_changes_what_is_predicted_by_a_factor(
    fold3d, line: str, more: str, what: str, least: float, most: float
):
    def predicted(words: str) -> float:
        found = fold3d.json(words)
        for name in what.split("."):
            found = found[int(name)] if name.isdigit() else found[name]
        return found

    assert least <= predicted(f"{line} {more}") / predicted(line) <= most


@pytest.mark.search
def test_chosen_layers_are_those_that_can_be_given(fold3d):
    even, chosen = fold3d.json(SPLIT), fold3d.json(f"{SPLIT} --layers auto")
    assert chosen["period_s"] < 0.99 * even["period_s"]
    layers = chosen["layers"]
    assert layers == [13, 12, 12, 11]  # the head is not recomputed
    assert "L'  no split is faster\n" in fold3d(f"{SPLIT} --layers auto")[1]
    line = f"{SPLIT} --layers {','.join(map(str, layers))}"
    assert fold3d.json(line) == chosen
    flag = "|".join(f"t*{n}" for n in layers)
    assert f"--pipeline-model-parallel-layout 'E{flag}L'" in fold3d(line)[1]


@pytest.mark.search
@pytest.mark.parametrize("microbatches", [32, 64])
def test_chosen_layers_are_those_of_merak(fold3d, microbatches):
    # 27, 26, 24 and 21 of GPT-2's 98 parts, of which a layer is two, embedding and head one each.
    line = "simulate --schedule 1f1b --pp 4 --model 48-1536-16 --cluster a100x8 --tp 2"
    found = fold3d.json(f"{line} --microbatches {microbatches} --layers auto")
    assert found["layers"] == [13, 13, 12, 10]


@pytest.mark.search
def test_layers_and_what_they_recompute_are_chosen_together(fold3d):
    split = SPLIT.replace("48-1536-16", "48-2560-16")
    result = fold3d.json(f"{split} --layers auto --recompute-layers auto")
    assert "--recompute-layers" in result["name"]
    even = fold3d.json(f"{split} --recompute-layers auto")
    assert result["period_s"] <= even["period_s"]


def test_flops_are_the_models_and_those_with_what_is_recomputed(fold3d):
    line = (
        "simulate --schedule 1f1b --pp 4 --microbatches 8 --model gpt3-14b --cluster a100x32 "
        "--tp 8 --transformer-impl local"  # fused attention recomputes its scores in any case
    )
    _, out, _ = fold3d(f"{line} --recompute full")
    assert re.search(
        r"^per GPU +[\d.]+ TFLOP/s of the model, [\d.]+ with recomputation$", out, re.M
    )
    found = {how: fold3d.json(f"{line} --recompute {how}") for how in ("none", "full")}
    none, full = (found[how]["hardware_flops_per_gpu_s"] for how in ("none", "full"))
    assert none == found["none"]["flops_per_gpu_s"]
    head = SHAPES["gpt3-14b"].head_flops / sum(SHAPES["gpt3-14b"].stage_flops(1))
    assert full / found["full"]["flops_per_gpu_s"] == pytest.approx((4 - head) / 3)


def test_stock_waits_for_its_sends_and_sums_segments_on_all_ranks_at_once(fold3d):
    def period_s(line: str) -> float:
        sizes = "--pp 2 --segments 2 --seconds p2p=0.5,sum=2"
        return fold3d.json(f"simulate {sizes} {line}")["period_s"]

    assert period_s("--schedule stock --microbatches 4") == 34.0
    assert period_s("--schedule interleaved --microbatches 4") == 33.5
    assert period_s("--schedule stock --global-batch-size 4") > 34.0  # sums come last
    _, out, _ = fold3d("plan --schedule stock --pp 2 --segments 2 --microbatches 4 --compute-only")
    assert out.startswith("0F0 0F1 2F0 2F1 0F2")


STOCK = "simulate --pp 2 --segments 2 --microbatches 4 --schedule stock"
COMBINED = "-- --overlap-moe-expert-parallel-comm"
PAIRED = "simulate --schedule aiao:pairs=on --pp 2 --microbatches 4 --tp 2 --transformer-impl local"
ONE_SEGMENT = "simulate --pp 4 --microbatches 8 --schedule 1f1b"
ONE_QUEUE = f"{SIMULATE} --cuda-connections 1"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("simulate --schedule afab:ahead=auto --pp 2 --microbatches 4", "only 1f1b, aiao, interle"),
        (f"{ONE_SEGMENT}:wgrad=gaps:held=3", "would hold 4 with 0F3 and may hold 3"),
        (f"{ONE_SEGMENT}:wgrad=gaps:held=0", "held=0: it limits what wgrad=gaps holds, and a rank"),
        (f"{ONE_SEGMENT}:held=4", "limits what wgrad=gaps holds"),
        (f"{ONE_SEGMENT}:wgrad=last@some", "'some' are no segments; give them as"),
        (
            f"{ONE_SEGMENT}:recompute=early --recompute full --seconds backward=3",
            "recompute=early: costs have no recomputation: give recompute and",
        ),
        # Hardware queues
        (f"{SIMULATE} --grad-sync-launches 7", "give --cuda-connections 1"),
        (f"{ONE_QUEUE} --grad-sync-launches 0", "it is 1 to 10000 collectives"),
        (f"{ONE_QUEUE} --schedule aiao:slices=on --grad-sync-launches 7", "is one collective"),
        (f"{ONE_QUEUE} --preemptive-comm", "give 8 or 32"),
        # Pairs of micro-batches, and all-to-alls of experts
        (PAIRED, "no collective of a layer in the costs: give tp in --seconds"),
        (f"{PAIRED} --seconds tp=2", "2.0 in tp_sync_s; it is a part of a forward of 1"),
        (f"{PAIRED} --seconds tp=1 --microbatches 1", "no pair in a plan of 1 micro-batches"),
        (f"{PAIRED} --seconds tp=1 --tp 1", "pairs=on with --tensor-model-parallel-size 1"),
        (f"{PAIRED} --seconds tp=1 --schedule zb-h1:pairs=on", "with --schedule zb-h1"),
        (
            f"{STOCK} --seconds p2p=0.1 {COMBINED}",
            "no all-to-all of experts in the costs: give --expert-model-parallel-size",
        ),
        # --schedule auto
        (f"{AUTO}:step=next", "step=next with --schedule auto: it chooses that itself"),
        (f"{AUTO} --svg a.svg", "--svg with --schedule auto: it says which settings"),
        # Models on clusters
        (f"{COUNTED} --segments 3", "try --segments 1, 2, 5, 10"),
        (f"{COUNTED} --straggler-sigma -1", "found straggler_sigma=-1.0; it is zero or more"),
        (f"{COUNTED} --layer-forward-s 0", "--layer-forward-s 0.0: give seconds above zero"),
        (f"{COUNTED} --recompute-layers 1,1", "these are 2 numbers, one for each stage, and the"),
        (
            f"{COUNTED} --recompute-layers auto --schedule aiao:ahead=auto",
            "give numbers, or drop one",
        ),
        ("simulate --schedule 1f1b --pp 2 --microbatches 2 --layers 2,1", "give a model and"),
        (f"{COUNTED} --global-batch-size 8", "both say the batch"),
        (f"{SPLIT} --layers 24,24", "needs as many numbers"),
        (f"{SPLIT} --layers 24,23,1,1", "together they are the 48 layers"),
        (f"{SPLIT} --layers even", "'even' is neither a list of numbers of layers such as"),
        (f"{SPLIT} --layers auto --recompute-layers 1,1,1,1", "that is for layers that are known"),
        (f"{SPLIT} --layers auto --schedule 1f1b:ahead=auto", "that is for layers that are known"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_a_line(fold3d, line: str, message: str):
    assert message in fold3d.refusal(line)

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fold3d.observe.breakdown import Breakdown, View, exposure_of_ranks
from megatron.fold3d.observe.report.page import page
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.passes.grad_sync import add_grad_sync
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link, sends_stock_waits_for
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.browser import CHROMIUM, MISSING, look
from tests.plans import built, planned


def timeline(ranks: int = 4, segments: int = 2, microbatches: int = 8, slower: float = 1.0):
    order = built("aiao", ranks, segments, microbatches)
    costs = Costs.uniform(
        ranks * segments,
        forward_s=0.006 * slower,
        backward_s=0.012 * slower,
        p2p_s=0.001,
        grad_sync_s=0.08,
    )
    return simulate(add_grad_sync(order), costs, iterations=2)


def view(name: str, of: Timeline) -> View:
    return View(name=name, timeline=of, row=Breakdown(of_rank=exposure_of_ranks(of)))


def two_views() -> str:
    views = [view("measured", timeline(slower=1.1)), view("simulated", timeline())]
    return page("aiao <4 ranks>", "a & b", views)


def test_the_page_loads_nothing_from_outside():
    html = two_views()
    assert re.findall(r"https?://\S+", html) == []
    assert not re.search(r"@import|url\(|<script src|<img|<iframe", html)
    assert re.findall(r'<link[^>]*href="([^"]*)"', html) == ["data:,"]


def test_words_are_escaped_and_data_cannot_end_its_script():
    html = page("</script><b>", "", [view("</script>", timeline())])
    assert "</script><b>" not in html
    assert html.count("</script>") == 2


def test_the_spans_are_embedded_lane_by_lane():
    data = json.loads(re.search(r'<script id="data".*?>(.*?)</script>', two_views())[1])
    measured, simulated = data["views"]
    assert [v["name"] for v in data["views"]] == ["measured", "simulated"]
    first = measured["ranks"][0]
    assert list(first) == ["compute", "p2p", "grad_sync"]
    assert first["compute"]["word"][:3] == ["0F0", "0F1", "0F2"]
    assert simulated["ranks"][0]["compute"]["end"][:2] == [6000.0, 12000.0]
    assert len(measured["ends"]) == 2


def test_a_page_can_show_one_run_alone():
    html = page("aiao", "", [view("measured", timeline())])
    assert "data-view" not in html.split("<script")[0]


def test_a_prediction_has_three_digits_and_a_measured_time_four():
    measured, predicted = view("measured", timeline()), view("aiao", timeline())
    html = page("both", "", [measured, replace(predicted, is_predicted=True)])
    assert "<b>428 ms</b><span>measured, per iteration; aiao 0.428 s</span>" in html


# What a reader does, with real events on the page's elements. `at` is a place in the chart.
ACT = """
view.draw();
const at = (x, y) => {
  const box = document.getElementById("chart").getBoundingClientRect();
  const place = { clientX: box.left + x, clientY: box.top + y, pointerId: 1 };
  return { ...place, bubbles: true, cancelable: true };
};
const chart = document.getElementById("chart"), tip = document.getElementById("tip");
const shown = () => document.getElementById("window").textContent;
const press = (key) => {
  chart.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
  view.draw();
};
const colors = (canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const found = {};
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] < 255) continue;
    const [r, g, b] = data.subarray(i, i + 3);
    const hue = b > r + 60 && b > g + 20 ? "blue" : r > b + 60 && r > g + 20 ? "orange" : "other";
    found[hue] = (found[hue] ?? 0) + 1;
  }
  return found;
};
"""

READ = """
const out = { title: document.title, whole: shown(), colors: colors(chart) };
out.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
chart.dispatchEvent(new PointerEvent("pointermove", at(GUTTER + 5, 20)));
view.draw();
out.tip = tip.hidden ? null : tip.innerText;
out.scrolls = chart.dispatchEvent(new WheelEvent("wheel", { ...at(400, 20), deltaY: -200 }));
view.draw();
out.scrolled = shown();
chart.dispatchEvent(new WheelEvent("wheel", { ...at(400, 20), deltaY: -200, ctrlKey: true }));
view.draw();
out.zoomed = shown();
chart.dispatchEvent(new PointerEvent("pointerdown", at(600, 20)));
chart.dispatchEvent(new PointerEvent("pointermove", at(500, 20)));
chart.dispatchEvent(new PointerEvent("pointerup", at(500, 20)));
view.draw();
out.moved = shown();
press("0");
out.fitted = shown();
chart.focus();
press("ArrowRight");
press("ArrowRight");
out.selected = document.getElementById("said").textContent;
press("Enter");
out.entered = shown();
press("ArrowDown");
out.below = document.getElementById("said").textContent;
press("Escape");
out.closed = tip.hidden;
press("0");
out.perfetto = ["w", "d", "a", "s"].map((key) => { press(key); return shown(); });
press("0");
const pathButton = document.getElementById("path"), before = chart.toDataURL();
pathButton.click();
view.draw();
out.path = [pathButton.getAttribute("aria-pressed"), before !== chart.toDataURL()];
const height = chart.clientHeight;
document.querySelector("[data-view='1']").click();
view.draw();
out.shorter = chart.clientHeight < height;
out.wide = document.documentElement.scrollWidth > window.innerWidth;
out.focusable = [...document.querySelectorAll("button, canvas[tabindex], summary")].length;
return out;
"""


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_reader_can_zoom_point_and_step_through_it(tmp_path: Path, theme: str):
    flags = ["--force-dark-mode"] if theme == "dark" else []
    seen, console = look(two_views(), ACT + READ, tmp_path, *flags)
    assert seen["theme"] == theme
    assert console == []
    assert seen["title"] == "aiao <4 ranks>"
    assert min(seen["colors"].get(color, 0) for color in ("blue", "orange")) > 5000
    assert [line for line in seen["tip"].splitlines() if line] == [
        "0F0 – forward",
        "rank 0 · segment 0 · micro-batch 0",
        "measured: 6.6 ms, starts at 0 ms",
        "simulated: 6 ms, starts at the same time in the iteration",
        "on the critical path",
    ]
    assert seen["scrolls"]  # nothing kept the page from it
    assert seen["scrolled"] == seen["whole"]
    first, last = (float(t) for t in re.findall(r"[\d.]+", seen["zoomed"])[:2])
    assert 0 < first < last < float(re.findall(r"[\d.]+", seen["whole"])[1])
    moved = [float(t) for t in re.findall(r"[\d.]+", seen["moved"])[:2]]
    assert moved[0] > first
    assert moved[1] - moved[0] == pytest.approx(last - first, rel=0.01)
    assert seen["fitted"] == seen["whole"]
    assert seen["selected"].startswith("0F1 – forward, rank 0")
    assert seen["entered"] != seen["whole"]
    assert seen["below"].startswith("4RECV_F0 – PP.sync of a forward, rank 0")
    assert seen["closed"]
    zoomed_in, moved_on, moved_back, zoomed_out = seen["perfetto"]
    assert zoomed_in == moved_back != moved_on
    assert zoomed_out == seen["whole"] != zoomed_in
    assert seen["path"] == ["false", True]
    assert seen["shorter"]
    assert not seen["wide"]
    assert seen["focusable"] >= 8


REDRAW = """
let drawn = 0;
const fill = CanvasRenderingContext2D.prototype.fillRect;
CanvasRenderingContext2D.prototype.fillRect = function (...box) { drawn++; fill.apply(this, box); };
const counts = [];
for (let i = 0; i < 6; i++) {
  const deltaY = i < 3 ? -120 : 120;
  chart.dispatchEvent(new WheelEvent("wheel", { ...at(500, 20), deltaY, ctrlKey: true }));
  drawn = 0;
  view.draw();
  counts.push(drawn);
}
const lanes = view.model.views[0].lanes.flat();
return {
  most: Math.max(...counts),
  pixels: lanes.length * chart.clientWidth,
  actions: lanes.reduce((n, lane) => n + lane.length, 0),
};
"""


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_of_a_hundred_thousand_actions_what_shares_a_pixel_is_drawn_once(tmp_path: Path):
    html = page("large", "", [view("simulated", timeline(8, 8, 200))])
    seen, console = look(html, ACT + REDRAW, tmp_path)
    assert console == []
    assert seen["actions"] > 100_000
    assert 0 < seen["most"] < seen["pixels"] < seen["actions"] / 3


ANALYSE = """
const out = { lanes: [], depth: 0 };
const p2p = view.model.views[0].lanes.flat().filter((lane) => lane.name === "p2p");
out.depth = Math.max(...p2p.map((lane) => lane.depth));
out.overlapping = p2p.some((lane) => lane.words.some((_, i) => lane.words.some((_, j) =>
  i < j && lane.row[i] === lane.row[j] && lane.start[j] < lane.end[i] - 0.2)));
out.legend = document.getElementById("legend").innerText;
const begins = () => view.model.views.map((each) => {
  const lane = each.lanes[0][0];
  return lane.start[lane.words.lastIndexOf("0F0")];
});
out.aligned = begins();
document.getElementById("align").click();
view.draw();
out.unaligned = begins();
document.getElementById("align").click();
view.draw();

const search = document.getElementById("search"), found = document.getElementById("found");
const find = (text) => {
  search.value = text;
  search.dispatchEvent(new Event("input"));
  return found.textContent;
};
out.found = ["0F1", "rank 1, waits", "no such thing"].map(find);
find("0F1");
out.first = [found.textContent, document.getElementById("said").textContent];
search.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" }));
out.cleared = found.textContent;

const whole = view.model.views[0].borders[0], axis = document.getElementById("axis");
const per = (view.width - GUTTER - RIGHT) / (view.to - view.from);
const px = (time) => GUTTER + (time - view.from) * per;
const on = (kind, time) => axis.dispatchEvent(new PointerEvent(kind, at(px(time), 5)));
on("pointerdown", 0);
on("pointermove", whole);
on("pointerup", whole);
out.title = document.getElementById("range-title").textContent;
out.rows = [...document.querySelectorAll("#range-table tbody tr")].map((row) =>
  [...row.children].map((cell) => cell.textContent));
press("Escape");
out.closed = document.getElementById("range").hidden;
return out;
"""


def waiting(slower: float) -> Timeline:
    order = built("interleaved", 2, 2, 4)
    times = {"forward_s": 0.01 * slower, "backward_s": 0.02 * slower, "p2p_latency_s": 0.016}
    costs = Costs.uniform(4, grad_sync_s=0.02, **times)
    link = Link(sends_waited_for=sends_stock_waits_for(2))
    return simulate(planned(order, gathers_params=True), costs, link, iterations=2)


SCROLL = """
view.draw();
const search = document.getElementById("search");
return ["0F0", "31F0"].map((text) => {
  search.value = text;
  search.dispatchEvent(new Event("input"));
  const { lane } = view.selected, box = document.getElementById("chart").getBoundingClientRect();
  const middle = box.top + view.layout.of(lane).top;
  return [lane.rank, window.scrollY > 0, 0 < middle && middle < window.innerHeight];
});
"""


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_the_page_scrolls_to_what_a_search_finds(tmp_path: Path):
    html = page("", "", [view("measured", timeline(ranks=32))])
    seen, console = look(html, SCROLL, tmp_path, size=(900, 600))
    assert console == []
    assert seen[0][::2] == [0, True]
    assert seen[1] == [31, True, True]


PAIR = """
const pairs = [];
for (const lane of view.model.views[0].lanes.flat()) lane.words.forEach((word, i) => {
  const twin = word.startsWith("wait ") && view.model.counterpart(lane, i);
  if (twin === false) return;
  const border = view.model.views[0].ends[0];
  pairs.push([lane.start[i] >= border, twin && twin.lane.words[twin.index] === word]);
});
return pairs;
"""


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_a_wait_is_paired_within_its_iteration(tmp_path: Path):
    measured = waiting(1.0)
    without = tuple(
        tuple(s for s in spans if s.lane != "wait" or not s.action or s.iteration == 1)
        for spans in measured.ranks
    )
    simulated = replace(measured, ranks=without)
    html = page("", "", [view("measured", measured), view("simulated", simulated)])
    pairs, console = look(html, ACT + PAIR, tmp_path)
    assert console == []
    assert {is_second for is_second, _ in pairs} == {True, False}
    assert [bool(twin) == is_second for is_second, twin in pairs] == [True] * len(pairs)


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_a_reader_can_align_search_and_sum_up(tmp_path: Path):
    measured, simulated = waiting(1.5), waiting(1.0)
    html = page("", "", [view("measured", measured), view("simulated", simulated)])
    seen, console = look(html, ACT + ANALYSE, tmp_path)
    assert console == []
    assert seen["depth"] > 1
    assert not seen["overlapping"]
    assert "waits for DP.sync" in seen["legend"]
    assert "waits for a transfer" in seen["legend"]
    assert seen["aligned"][0] == pytest.approx(seen["aligned"][1], abs=0.2)
    periods_us = [1e6 * timeline.iteration_ends_s(0)[0] for timeline in (measured, simulated)]
    found = seen["unaligned"][0] - seen["unaligned"][1]
    assert found == pytest.approx(periods_us[0] - periods_us[1], abs=0.2)

    waits = [s for t in (measured, simulated) for s in t.ranks[1] if s.lane == "wait" and s.action]
    assert seen["found"] == ["1 of 4", f"1 of {len(waits)}", "nothing"]
    assert seen["first"][0] == "1 of 4"
    assert seen["first"][1].startswith("0F1 – forward, rank 0")
    assert seen["cleared"] == ""

    rows = {name: cells for name, *cells in seen["rows"]}
    of_rank = [0.0, 0.0]
    for spans in measured.ranks:
        for span in spans:
            if span.lane == "compute" and span.iteration == 0:
                of_rank[span.action.op == "B"] += span.duration_s / 2
    for name, seconds in zip(("forward", "backward"), of_rank, strict=True):
        assert rows[name][0] == f"{1e3 * seconds:.4g} ms"
        assert rows[name][2] == "16"
    assert "waits for PP.sync of its forward" in rows
    shares = [float(row[1][:-1]) for name, row in rows.items() if "under way" not in name]
    assert sum(shares) == pytest.approx(100, abs=0.3)  # each is rounded
    assert seen["closed"]

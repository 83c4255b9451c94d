import json
import re
from pathlib import Path

import pytest

from megatron.fold3d.observe.breakdown import Breakdown, exposure_of_ranks
from megatron.fold3d.observe.exposure import mean
from megatron.fold3d.observe.report.page import View, page
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.passes.grad_sync import add_grad_sync
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.execution import Execution
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.browser import CHROMIUM, MISSING, look


def timeline(ranks: int = 4, segments: int = 2, microbatches: int = 8, slower: float = 1.0):
    order = build("aiao", num_ranks=ranks, num_segments=segments, num_microbatches=microbatches)
    costs = Costs.uniform(
        ranks * segments,
        forward_s=0.006 * slower,
        backward_s=0.012 * slower,
        p2p_s=0.001,
        grad_sync_s=0.08,
    )
    return simulate(add_grad_sync(order), costs, Execution(flush=True), iterations=2)


def view(name: str, of: Timeline) -> View:
    rows = exposure_of_ranks(of)
    return View(name=name, timeline=of, row=Breakdown(iteration=mean(rows), of_rank=rows))


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
chart.dispatchEvent(new PointerEvent("pointermove", at(140, 20)));
view.draw();
out.tip = tip.hidden ? null : tip.innerText;
chart.dispatchEvent(new WheelEvent("wheel", { ...at(400, 20), deltaY: -200 }));
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
        "simulated: 6 ms, starts at the same time",
        "on the critical path",
    ]
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
  chart.dispatchEvent(new WheelEvent("wheel", { ...at(500, 20), deltaY: i < 3 ? -120 : 120 }));
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

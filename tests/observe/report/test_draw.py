import re
from xml.etree import ElementTree

import pytest

from megatron.fold3d.observe.report.draw import Pipeline, caption_of, draw
from megatron.fold3d.observe.report.grid import to_text
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.passes.grad_sync import add_grad_sync
from megatron.fold3d.plan.passes.offload import add_offload
from megatron.fold3d.plan.passes.stock_grad_sync import serial_grad_sync
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link, sends_stock_waits_for
from megatron.fold3d.predict.simulator.simulate import simulate

SVG = "{http://www.w3.org/2000/svg}"


def aiao(ranks: int = 2, segments: int = 2, microbatches: int = 4) -> tuple[Plan, Timeline]:
    plan = build("aiao", num_ranks=ranks, num_segments=segments, num_microbatches=microbatches)
    costs = Costs.uniform(ranks * segments, grad_sync_s=5.0, p2p_s=0.1)
    return plan, simulate(add_grad_sync(add_offload(plan)), costs)


def alone(timeline: Timeline, title: str = "", caption: str = "") -> str:
    return draw([Pipeline("", caption, timeline)], title=title)


def boxes(svg: str, kind: str) -> list[ElementTree.Element]:
    rects = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    return [rect for rect in rects if re.fullmatch(rf"{kind}-\d+", rect.get("class", ""))]


def test_every_computation_is_a_box_and_every_grad_sync_a_thin_one():
    svg = alone(aiao()[1])
    legend = 2  # one swatch per segment
    assert len(boxes(svg, "forward")) == 2 * 2 * 4 + legend
    assert len(boxes(svg, "backward")) == 2 * 2 * 4 + legend
    heights = {
        kind: {b.get("height") for b in boxes(svg, kind)[:-legend]} for kind in ("forward", "sync")
    }
    assert float(heights["sync"].pop()) < float(heights["forward"].pop())


def test_weight_gradients_have_a_color_and_a_name_of_their_own():
    plan = delay_weight_grads(aiao()[0], [1])
    svg = alone(simulate(plan, Costs.uniform(4)))
    assert len(boxes(svg, "weight")) == 2 * 4 + 2
    assert ">weight gradient</text>" in svg
    assert "weight" not in alone(aiao()[1]).replace('font-weight="bold"', "")


def test_boxes_lie_inside_the_picture():
    root = ElementTree.fromstring(alone(aiao()[1]))
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.get("x", 0)) >= 0
        assert float(rect.get("x", 0)) + float(rect.get("width", 0)) <= width
        assert float(rect.get("y", 0)) + float(rect.get("height", 0)) <= height


def test_equal_timelines_give_equal_bytes():
    assert alone(aiao()[1], title="a") == alone(aiao()[1], title="a")


def test_an_svg_loads_nothing_from_outside():
    svg = alone(aiao()[1])
    assert not re.search(r"<script|<image|href|@import|url\(", svg)
    assert re.findall(r"https?://\S+?\"", svg) == ['http://www.w3.org/2000/svg"']


def test_words_are_escaped():
    root = ElementTree.fromstring(alone(aiao()[1], title='a < b & "c"', caption="<p>"))
    assert root.get("aria-label") == 'a < b & "c"'
    assert root.findtext(f"{SVG}title") == 'a < b & "c"'


def test_numbers_vanish_from_boxes_that_are_too_narrow():
    wide = alone(aiao(microbatches=4)[1]).count('class="n ')
    narrow = alone(aiao(microbatches=128)[1]).count('class="n ')
    assert narrow < wide


def test_numbers_of_a_row_vanish_together():
    for microbatches in (11, 16, 20, 24, 32):
        svg = alone(aiao(microbatches=microbatches)[1])
        assert (">9</text>" in svg) == (">10</text>" in svg)
    assert ">10</text>" in alone(aiao(microbatches=11)[1])


@pytest.mark.slow
def test_a_large_plan_stays_a_small_file():
    assert len(alone(aiao(ranks=16, segments=4, microbatches=128)[1])) < 1_000_000


def test_pipelines_drawn_together_share_a_time_axis_and_keep_their_shades():
    _, short = aiao(segments=1)
    _, long = aiao(segments=4)
    last_s = max(span.end_s for spans in long.ranks for span in spans)
    width = next(float(b.get("width", 0)) for b in boxes(alone(long), "backward"))
    pipelines = [Pipeline("a", "", short), Pipeline("b", "", long)]
    svg = draw(pipelines, title="both", until_s=2 * last_s)
    widths = {float(b.get("width", 0)) for b in boxes(svg, "backward")} - {16.1, 8.1}
    assert [min(widths), max(widths)] == pytest.approx([width / 2] * 2, abs=0.5)
    texts = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert texts.count("rank 0") == 2
    assert texts.count("time [s]") == 1
    shades = re.findall(r"\.(pipeline-\d) \.forward-0\{fill:(#\w+)\}", svg)
    assert len(set(shades)) == 2
    assert len({shade for _, shade in shades}) == 2


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("syncs", [False, True])
def test_the_legend_says_what_ranks_wait_for(sends: bool, syncs: bool):
    plan = build("1f1b", num_ranks=2, num_segments=1, num_microbatches=2)
    plan = serial_grad_sync(plan) if syncs else plan
    costs = Costs.uniform(2, p2p_s=1.0, grad_sync_s=3.0)
    waits = sends_stock_waits_for(2) if sends else frozenset()
    svg = alone(simulate(plan, costs, Link(sends_waited_for=waits)))
    named = [what for what, shown in (("DP.sync", syncs), ("sends", sends)) if shown]
    assert re.findall(">waits for ([^<]*)<", svg) == named


def test_waiting_is_an_outline_inside_its_time():
    plan = serial_grad_sync(build("1f1b", num_ranks=2, num_segments=1, num_microbatches=2))
    svg = alone(simulate(plan, Costs.uniform(2, grad_sync_s=3.0)))
    rects = ElementTree.fromstring(svg).iter(f"{SVG}rect")
    *waits, legend = (rect for rect in rects if rect.get("class") == "waits-sync")
    *syncs, _ = boxes(svg, "sync")
    assert ".waits-sync,.waits-p2p{fill:none" in svg
    assert legend.get("width") == "14.60"
    for wait, sync in zip(waits, syncs, strict=True):  # in the row above its DP.sync
        (left, right), (first, last) = (
            (float(b.get("x", 0)), float(b.get("x", 0)) + float(b.get("width", 0)))
            for b in (wait, sync)
        )
        assert first < left < right < last


def test_an_empty_timeline_can_be_drawn():
    ElementTree.fromstring(alone(Timeline(((), ()))))
    assert to_text(Timeline(((), ()))) == "rank 0 |\nrank 1 |\n"


def test_the_caption_says_what_was_run_and_what_it_exposes():
    plan = build("interleaved", num_ranks=2, num_segments=2, num_microbatches=4)
    costs = Costs.uniform(4, grad_sync_s=3.0)
    timeline = simulate(serial_grad_sync(plan), costs)
    assert caption_of(plan, timeline) == (
        "p = 2 · 2 segments · 4 micro-batches · bubble 9.1% of the time · "
        "exposed DP.sync 18.2% · peak activations 3 to 5 per rank"
    )


def test_grid_shows_the_pipeline():
    plan = build("1f1b", num_ranks=3, num_segments=1, num_microbatches=3)
    assert to_text(simulate(plan, Costs.uniform(3))) == (
        "rank 0 | 0F0 0F1 0F2 ·   ·   ·   ·   0B0──── ·   0B1──── ·   0B2────\n"
        "rank 1 | ·   1F0 1F1 ·   ·   1B0──── 1F2 1B1──── ·   1B2──── ·   ·\n"
        "rank 2 | ·   ·   2F0 2B0──── 2F1 2B1──── 2F2 2B2──── ·   ·   ·   ·\n"
    )


def test_grid_goes_on_in_a_further_block():
    plan = build("1f1b", num_ranks=1, num_segments=1, num_microbatches=2)
    assert to_text(simulate(plan, Costs.uniform(1)), width=26) == (
        "rank 0 | 0F0 0B0──── 0F1\n\nrank 0 | 0B1────\n"
    )


@pytest.mark.parametrize("title", ["Short", "A sentence about two runs that is " + "rather " * 12])
def test_a_title_fits_into_the_picture(title: str):
    svg = draw([Pipeline("a", "b", aiao()[1])], title=title, until_s=9.0)
    [size] = re.findall(rf'font-size="([\d.]+)" font-weight="bold">{title}</text>', svg)
    assert 24 + len(title) * float(size) * 0.62 < 1200
    assert float(size) <= 19


def test_a_long_legend_and_the_order_of_its_shades_are_in_two_lines():
    def tops(plan: Plan) -> tuple[float, float]:
        svg = alone(simulate(add_grad_sync(plan), Costs.uniform(16, grad_sync_s=5.0)))
        found = [re.search(rf'y="([\d.]+)"[^>]*>{name}', svg) for name in ("bubble", "lighter to")]
        bubble, order = (float(match[1]) for match in found if match)
        return bubble, order

    plan = aiao(segments=8)[0]
    bubble, order = tops(plan)
    assert bubble == order
    bubble, order = tops(add_offload(delay_weight_grads(plan, range(8))))
    assert bubble < order

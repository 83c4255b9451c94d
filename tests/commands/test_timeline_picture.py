import re
from xml.etree import ElementTree

import pytest

from megatron.fold3d.commands.timeline_picture import draw
from megatron.fold3d.observe.breakdown import Breakdown, View, exposure_of_ranks
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.passes.grad_sync import add_grad_sync, serial_grad_sync
from megatron.fold3d.plan.passes.offload import add_offload
from megatron.fold3d.plan.passes.weight_grads import delay_weight_grads
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link, sends_stock_waits_for
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built

SVG = "{http://www.w3.org/2000/svg}"

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.processes  # matplotlib lists the system's fonts once


def aiao(ranks: int = 2, segments: int = 2, microbatches: int = 4) -> tuple[Plan, Timeline]:
    plan = built("aiao", ranks, segments, microbatches)
    costs = Costs.uniform(ranks * segments, grad_sync_s=5.0, p2p_s=0.1)
    return plan, simulate(add_grad_sync(add_offload(plan)), costs)


def picture(title: str, **timelines: Timeline) -> str:
    views = [
        View(name=name, timeline=timeline, row=Breakdown(of_rank=exposure_of_ranks(timeline)))
        for name, timeline in timelines.items()
    ]
    return draw("--svg", title, views).decode()


def boxes(svg: str, kind: str) -> list[tuple[float, float, float, float]]:
    """Return left, top, right and bottom of the boxes of a kind of work."""
    found = []
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        if re.fullmatch(rf"{kind}-\d+", group.get("id", "")):
            [path] = group.iter(f"{SVG}path")
            for corners in path.get("d", "").split("z")[:-1]:
                x, y = ([float(n) for n in re.findall(r"-?[\d.]+", corners)[i::2]] for i in (0, 1))
                found.append((min(x), min(y), max(x), max(y)))
    return found


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_every_computation_is_a_box_and_every_grad_sync_a_thin_one():
    svg = picture("aiao", a=aiao()[1])
    assert len(boxes(svg, "forward")) == len(boxes(svg, "backward")) == 2 * 2 * 4
    forward, sync = (
        {round(bottom - top, 1) for _, top, _, bottom in boxes(svg, kind)}
        for kind in ("forward", "sync")
    )
    assert max(sync) < min(forward)


def test_weight_gradients_have_a_color_and_a_name_of_their_own():
    svg = picture("aiao", a=simulate(delay_weight_grads(aiao()[0], [1]), Costs.uniform(4)))
    assert len(boxes(svg, "weight")) == 2 * 4
    assert "weight gradient" in texts(svg)
    assert "weight gradient" not in texts(picture("aiao", a=aiao()[1]))


def test_boxes_lie_inside_the_picture():
    svg = picture("aiao", a=aiao()[1])
    _, _, width, height = map(float, ElementTree.fromstring(svg).get("viewBox", "").split())
    for kind in ("forward", "backward", "sync", "copy"):
        for left, top, right, bottom in boxes(svg, kind):
            assert 0 <= left <= right <= width
            assert 0 <= top <= bottom <= height


def test_equal_timelines_give_equal_bytes():
    assert picture("aiao", a=aiao()[1]) == picture("aiao", a=aiao()[1])


def test_an_svg_loads_nothing_from_outside():
    svg = picture("aiao", a=aiao()[1])
    assert not re.search(r"<script|<image|@import|url\((?!#)|href=\"(?!#)", svg)


def test_words_are_escaped():
    title = 'a < b & "c"'
    svg = picture(title, a=aiao()[1])
    assert title in texts(svg)
    assert ElementTree.fromstring(svg).findtext(f"{SVG}title") == title


def test_numbers_of_a_row_vanish_together_from_boxes_that_are_too_narrow():
    for microbatches in (11, 16, 20, 24, 32):
        svg = picture("aiao", a=aiao(microbatches=microbatches)[1])
        shown = re.findall(r"<text[^>]*font-size: 10px[^>]*>(\d+)</text>", svg)  # no ticks
        assert shown.count("9") == shown.count("10")
    assert "10" in texts(picture("aiao", a=aiao(segments=1, microbatches=11)[1]))


@pytest.mark.slow
def test_a_large_plan_stays_a_small_file():
    assert len(picture("aiao", a=aiao(ranks=16, segments=4, microbatches=128)[1])) < 1_000_000


def test_pipelines_drawn_together_share_a_time_axis_and_keep_their_shades():
    short, long = aiao(segments=1)[1], aiao(segments=4)[1]
    svg = picture("both", A=short, B=long)
    widths = [right - left for left, _, right, _ in boxes(svg, "forward")]
    assert max(widths) - min(widths) < 0.01  # one takes as long in both
    words = texts(svg)
    assert words.count("rank 0") == 2
    assert words.count("time [s]") == 1
    assert {"A", "B"} < {*words}
    fills = re.findall(r'id="forward-0">\s*<path[^>]*fill: (#\w+)', svg)
    assert len({*fills}) == len(fills) == 2


@pytest.mark.parametrize("sends", [False, True])
@pytest.mark.parametrize("syncs", [False, True])
def test_the_legend_says_what_ranks_wait_for(sends: bool, syncs: bool):
    plan = built("1f1b", 2, 1, 2)
    plan = serial_grad_sync(plan) if syncs else plan
    costs = Costs.uniform(2, p2p_s=1.0, grad_sync_s=3.0)
    waits = sends_stock_waits_for(2) if sends else frozenset()
    svg = picture("1f1b", a=simulate(plan, costs, Link(sends_waited_for=waits)))
    named = [what for what, shown in (("DP.sync", syncs), ("sends", sends)) if shown]
    assert [text[10:] for text in texts(svg) if text.startswith("waits for ")] == named


def test_waiting_is_an_outline_inside_its_time():
    plan = serial_grad_sync(built("1f1b", 2, 1, 2))
    svg = picture("1f1b", a=simulate(plan, Costs.uniform(2, grad_sync_s=3.0)))
    assert re.search(r'id="waits-sync-0">\s*<path[^>]*fill: none', svg)
    waits, syncs = boxes(svg, "waits-sync"), boxes(svg, "sync")
    assert len(waits) == len(syncs) == 2
    for (left, _, right, _), (first, _, last, _) in zip(waits, syncs, strict=True):
        assert first < left < right < last  # in the row above its DP.sync


def test_a_wait_that_is_narrower_than_its_outline_is_filled():
    plan = serial_grad_sync(built("1f1b", 2, 1, 2))
    svg = picture("1f1b", a=simulate(plan, Costs.uniform(2, grad_sync_s=0.01)))
    assert len(boxes(svg, "short-waits-sync")) == 2
    assert not boxes(svg, "waits-sync")
    assert re.search(r'id="short-waits-sync-0">\s*<path[^>]*fill: #', svg)


def test_a_timeline_of_no_length_can_be_drawn():
    plan = built("1f1b", 2, 1, 2)
    timeline = simulate(plan, Costs.uniform(2, forward_s=0, backward_s=0))
    ElementTree.fromstring(picture("a", a=timeline))


def test_the_caption_says_what_an_iteration_takes_and_exposes():
    plan = built("interleaved", 2, 2, 4)
    timeline = simulate(serial_grad_sync(plan), Costs.uniform(4, grad_sync_s=3.0))
    svg = picture("interleaved", a=timeline)
    assert "33000 ms per iteration: bubble 9.1%, exposed DP.sync 18.2%" in texts(svg)


@pytest.mark.parametrize("title", ["Short", "A sentence about two runs that is " + "rather " * 12])
def test_a_title_fits_into_the_picture(title: str):
    svg = picture(title, a=aiao()[1], b=aiao()[1])
    lines = re.findall(r"<text[^>]*font-weight: 700; font-size: 12px[^>]*>([^<]*)</text>", svg)[
        :-2
    ]  # then the names
    assert " ".join(lines) == title.strip()
    assert all(12 + len(line) * 12 * 0.66 < 560 for line in lines)

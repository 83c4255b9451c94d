import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from random import Random
from zlib import crc32

import pytest

from megatron.fold3d.observe.exposure import exposure, mean
from megatron.fold3d.observe.report.playground import BEGIN, SCHEDULES, Fixed, playground
from megatron.fold3d.observe.timeline import Timeline
from megatron.fold3d.plan import schedules
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.plan.passes.place_weight_grads import StageTimes, place_weight_grads
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link
from megatron.fold3d.predict.simulator.simulate import steady_state
from scripts.playground import page
from tests.browser import CHROMIUM, MISSING, look
from tests.plans import planned

CHECKED_IN = Path(__file__).parents[3] / "docs/playground.html"
WHERE = ("serial", "overlap", "deferred")


def plan_of(
    schedule: str,
    p: int,
    m: int,
    ns: int,
    where: str = "",
    *,
    ahead: int = 1,
    gaps: tuple[float, float] | None = None,
) -> Plan:
    """Return a plan; ``gaps`` are the times of a transfer and a backward, for weight gradients."""
    ns = 1 if schedule in schedules.ONE_SEGMENT_SCHEDULES else ns
    forwards = ahead if schedule == "1f1b" else None
    order = schedules.build(
        schedule, num_ranks=p, num_segments=ns, num_microbatches=m, forwards_ahead=forwards
    )
    if gaps is not None:
        transfer, backward = gaps
        halves = (backward / ns / 2,) * (p * ns)
        forward = (1 / ns,) * (p * ns)
        times = StageTimes(
            forward_s=forward, backward_s=halves, weight_s=halves, transfer_s=transfer
        )
        order = place_weight_grads(order, times)
    if not where:
        return order
    parts = "step=next" if where == "deferred" else ""
    grad_sync = "serial" if where == "serial" else "overlap"
    return planned(order, parts, transfers=False, grad_sync=grad_sync)


def timeline_of(plan: Plan, where: str, first: bool, transfer: float, sync: float) -> Timeline:
    ns = plan.num_segments
    costs = Costs.uniform(
        plan.num_stages,
        forward_s=1 / ns,
        backward_s=2 / ns,
        p2p_s=transfer,
        grad_sync_s=sync / ns,
    )
    deferred = where == "deferred"
    link = Link(
        preemptive=first,
        grad_sync_order="edf" if deferred else "fifo",
    )
    return steady_state(plan, costs, link)


def test_the_page_in_the_docs_is_what_its_script_writes():
    made = page()
    assert CHECKED_IN.read_text(encoding="utf-8") == made, "run scripts/playground.py"
    assert len(made) < 1_000_000
    assert re.findall(r"https?://\S+", made) == []
    assert not re.search(r"@import|url\(|<script src|<img|<iframe", made)


def test_the_page_knows_no_schedule_that_we_have_not():
    assert set(SCHEDULES) <= set(schedules.SCHEDULES)


# Compares with Python's through checksums of the plans, and span by span.
COMPARE = """
const crc = (text) => {
  let value = -1;
  for (let i = 0; i < text.length; i++) {
    value ^= text.charCodeAt(i);
    for (let k = 0; k < 8; k++) value = (value >>> 1) ^ (value & 1 ? 0xedb88320 : 0);
  }
  return ~value >>> 0;
};
const placed = GAPS.map(([name, p, m, segments, where, ahead, transfer, backward]) => {
  const sizes = sizesOf(name, { p, m, ns: segments, ahead }), { ns } = sizes;
  const costs = { forward: 1 / ns, backward: backward / ns, transfer };
  return planOf(name, sizes, where, costs).map((program) => program.map(spellAction).join(" "));
});
const line = (program) => program.map(spellAction).join(" ") + "\\n";
const plans = PLANS.map(([name, p, m, ns, where]) => {
  const sizes = sizesOf(name, { p, m, ns, ahead: 1 });
  const made = where ? planOf(name, sizes, where)
    : numbers(p).map((rank) => SCHEDULES[name].program(rank, sizes));
  return crc(made.map(line).join(""));
});
const runs = RUNS.map(([name, p, m, segments, where, messagesFirst, transfer, sync]) => {
  const { ns } = sizesOf(name, { p, m, ns: segments });
  const programs = planOf(name, { p, m, ns, ahead: 1 }, where);
  const costs = { forward: 1 / ns, backward: 2 / ns, transfer, sync: sync / ns };
  const run = simulate(programs, ns, costs, { where, messagesFirst });
  const spans = run.ranks.map((all) => all.map(({ lane, start, end, action, iteration }) =>
    [lane, action ? spellAction(action) : "", iteration, start, end]));
  const result = { exposure: exposureOf(run), held: mostHeld(programs, ns) };
  return { spans, period: run.to - run.from, ...result };
});
return { plans, placed, runs, largest: LARGEST };
"""


def some_runs(random: Random) -> list[tuple]:
    times = ((0.0, 0.03, 0.3, 0.9), (0.0, 1.0, 5.0, 16.0))
    return [
        (
            *(schedule, random.randint(1, 5), random.randint(1, 7), random.randint(1, 3)),
            *(where, first, *map(random.choice, times)),
        )
        for schedule, where, first in product(SCHEDULES, WHERE, (False, True))
    ]


def some_gaps(random: Random) -> Iterator[tuple]:
    """Yield plans whose weight gradients fill gaps."""
    for schedule, where, ahead in product(("1f1b", "interleaved", "aiao"), WHERE, (1, 2, 4)):
        for _ in range(3):
            sizes = (random.randint(1, 6), random.randint(1, 12), random.randint(1, 3))
            times = random.choice((0.0, 0.1, 0.6, 1.0)), random.choice((2.0, 2.5, 3.0))
            yield (schedule, *sizes, where, ahead, *times)


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_its_plans_and_times_are_ours(tmp_path: Path):
    sizes = list(product((1, 2, 3, 4, 5, 12), (1, 2, 3, 4, 5, 7, 8, 13, 16, 32), (1, 2, 3, 6)))
    plans = [
        *((schedule, *size, "") for schedule in SCHEDULES for size in sizes),
        *product(SCHEDULES, (1, 3), (1, 4), (1, 3), WHERE),
    ]
    runs, gaps = some_runs(Random(7)), list(some_gaps(Random(8)))
    script = COMPARE.replace("PLANS", json.dumps(plans)).replace("RUNS", json.dumps(runs))
    script = script.replace("GAPS", json.dumps(gaps))
    seen, console = look(playground(), script, tmp_path)
    assert console == []
    assert list(seen["largest"].values()) == [12, 32, 6, 4]  # the largest of the sizes above
    for asked, found in zip(gaps, seen["placed"], strict=True):
        *sizes, ahead, transfer, backward = asked
        plan = plan_of(*sizes, ahead=ahead, gaps=(transfer, backward))
        assert plan.to_text().splitlines() == found, asked
    for asked, found in zip(plans, seen["plans"], strict=True):
        assert crc32(plan_of(*asked).to_text().encode()) == found, asked
    for asked, found in zip(runs, seen["runs"], strict=True):
        plan = plan_of(*asked[:5])
        timeline = timeline_of(plan, *asked[4:])
        for ours, theirs in zip(timeline.ranks, found["spans"], strict=True):
            here = sorted(
                (s.lane, str(s.action or ""), s.iteration, s.start_s, s.end_s) for s in ours
            )
            there = sorted((lane, word, *rest) for lane, word, *rest in theirs)
            assert [span[:3] for span in here] == [span[:3] for span in there], asked
            for times in zip(here, there, strict=True):
                assert times[0][3:] == pytest.approx(times[1][3:]), asked
        row = mean(exposure(timeline))
        compute_s = row.forward_s + row.backward_s
        parts = {"bubble": row.bubble_s, "sync": row.grad_sync_s, "transfer": row.p2p_s}
        assert found["exposure"] == pytest.approx({"compute": compute_s, **parts}, abs=1e-9), asked
        assert found["period"] == pytest.approx(timeline.period_s), asked
        assert found["held"] == max(peak_activations(plan)) / plan.num_segments, asked


PLAY = """
const sections = document.getElementById("cards").children;
const cards = () => [...sections].map((card) => card.dataset.name);
const fact = (name, number) => [...document.querySelectorAll(`[data-name="${name}"] dd`)][number]
  .textContent;
const painted = (name) => document.querySelector(`[data-name="${name}"] canvas`).toDataURL();
const put = (id, value) => {
  const slider = document.getElementById(id);
  slider.value = value;
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  playground.update();
};
const press = (selector) => { document.querySelector(selector).click(); playground.update(); };
const out = { cards: cards(), first: fact("aiao", 0), picture: painted("aiao").length };
const before = painted("aiao");
put("sync", 0);
out.noSync = [fact("aiao", 0), fact("aiao", 2), before !== painted("aiao")];
put("transfer", 0);
out.bubble = ["1f1b", "interleaved"].map((name) => fact(name, 1));
put("p", 1);
put("m", 1);
out.least = fact("1f1b", 0);
press("[data-schedule='zb-h2']");
press("[data-schedule='1f1b']");
press("[data-where='deferred']");
press("#first");
out.chosen = cards();
out.address = location.hash;
put("p", 4);
put("m", 16);
put("transfer", 0.6);
press("[data-schedule='1f1b']");
press("[data-where='overlap']");
const slow = fact("1f1b", 0);
put("ahead", 2);
const ahead = fact("1f1b", 0);
press("#gaps");
out.times = [slow, ahead, fact("1f1b", 0)].map(parseFloat);
out.weights = document.getElementById("legend").innerText.includes("weight gradients");
press("[data-example^='Llama 3 70B']");
out.preset = ["p", "m", "ns"].map((id) => document.getElementById(`${id}-value`).textContent);
out.plain = ["first", "gaps"].map((id) => document.getElementById(id).checked);
press("[data-example='slow DP.sync']");
out.example = [document.getElementById("ns-value").textContent, fact("aiao", 0)];
const canvas = document.querySelector("[data-name='aiao'] canvas");
const box = canvas.getBoundingClientRect();
const place = { clientX: box.left + 64, clientY: box.top + 8, bubbles: true };
canvas.dispatchEvent(new PointerEvent("pointermove", place));
out.tip = document.getElementById("tip").innerText.split("\\n").filter(Boolean);
out.badges = [...document.querySelectorAll(".badge.best")].length;
out.wide = document.documentElement.scrollWidth > window.innerWidth;
return out;
"""


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_a_reader_moves_sliders_and_chooses_schedules(tmp_path: Path):
    seen, console = look(page(), PLAY, tmp_path)
    assert console == []
    timeline = timeline_of(
        plan_of("aiao", BEGIN["p"], BEGIN["m"], BEGIN["ns"], "overlap"),
        *("overlap", False, BEGIN["transfer"], BEGIN["sync"]),
    )
    assert seen["cards"] == ["1f1b", "interleaved", "aiao"]
    assert seen["first"] == f"{timeline.period_s:.3g} forwards"
    assert seen["picture"] > 5000
    shorter, exposed, redrawn = seen["noSync"]
    assert (exposed, redrawn) == ("0.0%", True)
    assert float(shorter.split()[0]) < timeline.period_s
    # Of the time, the bubble is (p - 1) / (m + p - 1), and with segments (p - 1) / (ns m + p - 1).
    assert seen["bubble"] == ["27.3%", "11.1%"]
    assert seen["least"] == "3 forwards"
    assert seen["chosen"] == ["interleaved", "aiao", "zb-h2"]
    assert "p=1&m=1&ns=3&" in seen["address"]
    assert "where=deferred" in seen["address"]
    assert "first=1" in seen["address"]
    assert "shown=interleaved%2Caiao%2Czb-h2" in seen["address"]
    slow, ahead, gaps = seen["times"]
    assert gaps < ahead < slow
    assert seen["weights"]
    assert seen["preset"] == ["4", "16", "4"]
    assert seen["plain"] == [False, False]
    assert seen["example"] == ["4", "31.2 forwards"]
    assert seen["tip"] == ["0F0 – forward", "rank 0 · segment 0 · micro-batch 0", "takes 0.25"]
    assert seen["badges"] >= 1
    assert not seen["wide"]


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
def test_a_plan_that_the_page_cannot_make_is_shown_as_it_is(tmp_path: Path):
    plan = plan_of("aiao", 2, 4, 2, "overlap")
    timeline = timeline_of(plan, "overlap", False, 0.1, 3.0)
    fixed = Fixed(name="<mine>", timeline=timeline, peak_activations=peak_activations(plan))
    settings = {**BEGIN, "p": 2, "m": 4, "ns": 2, "transfer": 0.1, "sync": 3.0, "shown": ("aiao",)}
    script = """
    return [...document.querySelectorAll("#cards section")].map((card) => [
      card.querySelector("h2").textContent, card.querySelector("dl").textContent,
      card.querySelector("canvas").toDataURL()]);
    """
    (mine, *here), (other, *there) = look(
        playground(settings, forward_s=1.0, fixed=fixed), script, tmp_path
    )[0]
    assert (mine, other) == ("This command: <mine>", "AIAO, all-in-all-out")
    assert here == there  # the same simulation, once Python's and once the page's

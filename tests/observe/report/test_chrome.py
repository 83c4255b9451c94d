import json
import re
from collections import Counter, defaultdict
from dataclasses import replace

from megatron.fold3d.observe.report.chrome import to_chrome
from megatron.fold3d.plan.ops import COMPUTE_OPS
from megatron.fold3d.plan.passes.grad_sync import add_grad_sync
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link, sends_stock_waits_for
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built, planned

PLAN = add_grad_sync(built("aiao", 2, 2, 3))
TIMELINE = simulate(PLAN, Costs.uniform(4, p2p_s=0.5, grad_sync_s=4.0))
EVENTS = json.loads(to_chrome({"measured": TIMELINE, "simulated": TIMELINE}))["traceEvents"]


def phase(letter: str) -> list[dict]:
    return [event for event in EVENTS if event["ph"] == letter]


def test_every_span_becomes_a_slice_in_microseconds():
    spans = sum(map(len, TIMELINE.ranks))
    assert len(phase("X")) == 2 * spans
    first = next(e for e in phase("X") if e["args"].get("action") == "1B2")
    span = next(s for s in TIMELINE.ranks[1] if str(s.action) == "1B2")
    assert (first["name"], first["args"]["segment"], first["args"]["microbatch"]) == (
        *("backward 2", 0, 2),
    )
    assert (first["ts"], first["dur"]) == (span.start_s * 1e6, span.duration_s * 1e6)


def test_each_rank_of_each_run_is_a_process_with_a_name():
    names = [e["args"]["name"] for e in phase("M") if e["name"] == "process_name"]
    assert names == [
        *("measured: rank 0", "measured: rank 1", "simulated: rank 0", "simulated: rank 1")
    ]


def test_slices_of_one_thread_never_overlap():
    threads = defaultdict(list)
    for event in phase("X"):
        threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in threads.values():
        for (_, end), (start, _) in zip(sorted(slices), sorted(slices)[1:], strict=False):
            assert end <= start + 1e-3


def test_an_arrow_goes_from_each_computation_to_the_one_that_reads_it():
    assert Counter(e["name"] for e in phase("s")) == Counter(e["name"] for e in phase("f"))
    messages = sum(span.lane == "p2p" for spans in TIMELINE.ranks for span in spans)
    assert len(phase("s")) == 2 * messages
    starts = {e["id"]: e["ts"] for e in phase("s")}
    assert all(starts[e["id"]] <= e["ts"] for e in phase("f"))


def test_a_wait_says_what_it_waits_for():
    plan = planned(PLAN.select(COMPUTE_OPS), gathers_params=True)
    costs = replace(Costs.uniform(4, p2p_s=0.5, grad_sync_s=4.0), param_gather_s=(4.0,) * 4)
    link = Link(sends_waited_for=sends_stock_waits_for(2))
    timeline = simulate(plan, costs, link, iterations=2)
    events = json.loads(to_chrome({"simulated": timeline}))["traceEvents"]
    assert {re.sub(r" \d+$", "", e["name"]) for e in events if e.get("cat") == "wait"} == {
        "waits for DP.sync of the gradients",
        "waits for DP.sync of the parameters",
        "waits for PP.sync of its forward",
        "wait",  # at the end of the iteration
    }

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fold3d.predict.simulator.clock import SimulatedClock
from megatron.fold3d.predict.simulator.link import Use
from megatron.fold3d.predict.simulator.network import Flow, Network

pairs = st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(lambda pair: pair[0] != pair[1])


def started(clock, messages, collectives=(), *, preemptive=True, work_s=1.0, **more):
    network = Network(clock, 4, preemptive=preemptive, **more)
    ended = []

    def done(tag):
        ended.append((tag, clock.now_s))

    flows = [network.message(*pair, work_s, done, i) for i, pair in enumerate(messages)]
    start(network, flows)
    for nic in collectives:
        collective = network.collective(nic, work_s, done, f"sync {nic}")
        flows += collective
        start(network, collective)
    network.update_rates()
    return network, flows, ended


def start(network, flows):
    for flow in flows:
        network.start_flow(flow)


def load(flows: list[Flow], link: int) -> float:
    return sum(flow.rate for flow in flows if link in flow.links)


@given(st.lists(pairs, min_size=1, max_size=12))
def test_rates_are_max_min_fair(messages):
    _, flows, _ = started(SimulatedClock(), messages)
    for link in range(8):
        assert load(flows, link) <= 1 + 1e-9
    for flow in flows:  # each has a full link on which nobody has more
        assert any(
            load(flows, link) > 1 - 1e-9
            and all(other.rate <= flow.rate + 1e-9 for other in flows if link in other.links)
            for link in flow.links
        )


@given(st.lists(pairs, max_size=8), st.sets(st.integers(0, 3)))
def test_collectives_take_what_messages_leave(messages, collectives):
    _, flows, _ = started(SimulatedClock(), messages, collectives)
    _, alone, _ = started(SimulatedClock(), messages)
    assert [f.rate for f in flows[: len(messages)]] == [f.rate for f in alone]
    for flow in flows[len(messages) :]:
        used = max(load(alone, link) for link in flow.links)
        assert flow.rate == pytest.approx(1 - used)


@given(st.lists(pairs, max_size=8), st.sets(st.integers(0, 3)), st.booleans(), st.booleans())
def test_every_flow_ends_and_none_is_faster_than_its_link(
    messages, collectives, preemptive, buffered
):
    clock = SimulatedClock()
    network, _, ended = started(
        clock, messages, collectives, preemptive=preemptive, rings_are_buffered=buffered
    )
    clock.run(between=network.update_rates)
    assert len(ended) == len(messages) + len(collectives)
    assert all(time_s >= 1 - 1e-9 for _, time_s in ended)


@pytest.mark.parametrize("preemptive", [False, True])
@pytest.mark.parametrize(("buffered", "end_s"), [(False, 6.0), (True, 5.0)])
def test_messages_slow_a_buffered_ring_down_in_their_own_direction(buffered, end_s, preemptive):
    """A message out of the ring's NIC, and when it has arrived, one into it."""
    clock = SimulatedClock()
    network, _, ended = started(clock, [(0, 1)], preemptive=preemptive, rings_are_buffered=buffered)

    def done(tag):
        ended.append((tag, clock.now_s))

    start(network, network.collective(0, 4.0, done, "sync"))
    answer = network.message(1, 0, 1.0, done, "answer")
    clock.at(2.0, network.start_flow, answer)
    clock.run(between=network.update_rates)
    # Each shares its link with the ring for two seconds, or has it alone for one.
    arrive_s = (1.0, 3.0) if preemptive else (2.0, 4.0)
    assert ended == [(0, arrive_s[0]), ("answer", arrive_s[1]), ("sync", end_s)]


def test_a_buffered_ring_that_was_stopped_goes_on_with_what_is_left_of_each_direction():
    clock = SimulatedClock()
    network, _, ended = started(clock, [(0, 1)], preemptive=False, rings_are_buffered=True)
    ring = network.collective(0, 2.0, lambda tag: ended.append((tag, clock.now_s)), "sync")
    start(network, ring)
    clock.at(2.5, lambda _: [network.stop_flow(flow) for flow in ring], None)
    clock.at(4.0, lambda _: start(network, ring), None)
    clock.run(between=network.update_rates)
    # At 2.5 s all has arrived, and half a second of what leaves is left.
    assert ended == [(0, 2.0), ("sync", 4.5)]


def test_the_share_of_a_flow_that_ends_goes_to_the_others():
    clock = SimulatedClock()
    network, _, ended = started(clock, [(0, 1), (0, 2)])
    third = network.message(0, 3, 0.25, lambda tag: ended.append((tag, clock.now_s)), "short")
    network.start_flow(third)
    clock.run(between=network.update_rates)
    # A third each until 0.75; half each for the 0.75 that is left of the other two.
    assert ended == [
        ("short", pytest.approx(0.75)),
        (0, pytest.approx(2.25)),
        (1, pytest.approx(2.25)),
    ]


def test_collectives_take_what_messages_leave_of_links_between_switches():
    clock = SimulatedClock()
    network = Network(clock, 4, (1.5,), preemptive=True)
    shared = (Use(0, 1),)
    flows = [network.message(0, 1, 1.0, lambda _: None, None, shared)]
    for nic in (2, 3):
        flows += network.collective(nic, 1.0, lambda _: None, None, shared)
    start(network, flows)
    network.update_rates()
    assert [flow.rate for flow in flows] == [1.0, 0.25, 0.25]


def test_a_flow_that_stands_for_several_takes_its_part_of_a_link_for_each():
    clock = SimulatedClock()
    network = Network(clock, 4, (2.0,), preemptive=False)
    many = network.message(0, 1, 1.0, lambda _: None, None, (Use(0, 3),))
    one = network.message(2, 3, 1.0, lambda _: None, None, (Use(0, 1),))
    start(network, (many, one))
    network.update_rates()
    assert (many.rate, one.rate) == (0.5, 0.5)
    network.stop_flow(one)
    network.update_rates()
    assert many.rate == pytest.approx(2 / 3)

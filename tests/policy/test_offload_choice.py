"""What leaves is what memory demands, and as early as it takes for compute to hide the copies."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.fold3d.plan.ir import Action, Op, Plan
from megatron.fold3d.plan.memory import peak_activations
from megatron.fold3d.plan.ops import COMPUTE_OPS
from megatron.fold3d.plan.passes.offload import OffloadChoice, add_offload
from megatron.fold3d.policy.offload_choice import OffloadTimes, choose_offload, offloaded, waits_s
from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.simulate import simulate
from megatron.fold3d.runtime.events import Events
from megatron.fold3d.runtime.offload import host_memory, offloader
from megatron.fold3d.runtime.offload.copies import Copies, Watch
from megatron.fold3d.runtime.offload.offloader import Offloader
from tests.configs import CONFIG
from tests.plans import built

CPU = torch.device("cpu")
PLAN = built("afab", 1, 1, 20)
PROGRAM = PLAN.programs[0]
AIAO = built("aiao", 4, 3, 12).programs[1]
MEASURED = OffloadTimes(
    activation_bytes=100,
    held=3,
    spare_bytes=0,
    forward_s=1.0,
    backward_s=2.0,
    offload_s=0.5,
    reload_s=0.5,
)


@pytest.mark.parametrize("spare", [0, 3, 10, 16])
def test_memory_that_is_left_over_is_used(spare: int):
    measured = replace(MEASURED, spare_bytes=spare * 112)  # 112: a tenth is left alone
    leave = choose_offload(PROGRAM, measured, sparing=True).at_most
    assert leave is not None

    assert peak_activations(add_offload(PLAN, at_most=leave))[0] <= 3 + spare
    if leave:
        assert peak_activations(add_offload(PLAN, at_most=leave - 1))[0] > 3 + spare


def test_nothing_leaves_where_all_fits():
    roomy, host = replace(MEASURED, spare_bytes=20 * 112), replace(MEASURED, spare_bytes=None)
    assert choose_offload(PROGRAM, roomy, sparing=True) == OffloadChoice(0)
    assert choose_offload(PROGRAM, host, sparing=True) == OffloadChoice(0)
    assert choose_offload(PROGRAM, host, sparing=False) == OffloadChoice()


@pytest.mark.parametrize("sparing", [True, False])
@pytest.mark.parametrize("program", [PROGRAM, AIAO], ids=["afab", "aiao"])
def test_copies_that_take_no_longer_than_a_forward_have_one_computation(program, sparing):
    for copy_s in (0.1, 1.0):
        measured = replace(MEASURED, offload_s=copy_s, reload_s=copy_s)
        choice = choose_offload(program, measured, sparing=sparing)
        assert choice.depth == 1
        assert waits_s(offloaded(program, choice), measured, 1) == 0


def test_slower_copies_have_as_many_computations_as_hide_them():
    # A fifth has to leave. Each has the time of five computations, if it may take it.
    measured = replace(MEASURED, spare_bytes=14 * 112, offload_s=2.5, reload_s=2.5)
    choice = choose_offload(PROGRAM, measured, sparing=True)
    assert choice.depth == 3
    assert waits_s(offloaded(PROGRAM, choice), measured, choice.depth) == 0
    shallow = replace(choice, depth=1)
    assert waits_s(offloaded(PROGRAM, shallow), measured, 1) > 5
    peak = peak_activations(
        add_offload(PLAN, depth=choice.depth, at_most=choice.at_most), depth=choice.depth
    )
    assert peak[0] <= measured.held + 14


def test_a_way_back_that_is_slow_at_first_begins_earlier_where_memory_allows():
    # Behind the last forward the first one's copy has that forward alone; later ones a backward.
    measured = replace(MEASURED, offload_s=1.0, reload_s=1.9, spare_bytes=10 * 112)
    assert choose_offload(PROGRAM, measured, sparing=False) == OffloadChoice(None, 2)
    assert choose_offload(
        PROGRAM, replace(measured, spare_bytes=0), sparing=False
    ) == OffloadChoice(None, 1)


def test_copies_that_take_longer_than_compute_are_not_begun(caplog: pytest.LogCaptureFixture):
    slow = replace(MEASURED, offload_s=4.0)
    choice = choose_offload(PROGRAM, slow, sparing=True)
    assert choice.at_most == 5  # of 20, while each copy takes as long as four forwards
    assert waits_s(offloaded(PROGRAM, choice), slow, choice.depth) < 1
    assert "memory for 3 activations; with the copies that compute hides, of 5, it" in caplog.text
    assert choose_offload(PROGRAM, replace(MEASURED, reload_s=80.0), sparing=True).at_most == 0


@pytest.mark.parametrize("program", [PROGRAM, AIAO], ids=["afab", "aiao"])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_simulator_waits_for_reloads_as_long_as_the_choice_expects(program, depth):
    # Copies to the host fit behind one computation, so that none waits for the memory they free.
    measured = replace(MEASURED, offload_s=0.75, reload_s=3.5)
    alone = tuple(a for a in program if a.op in COMPUTE_OPS)
    numbers = {stage: n for n, stage in enumerate(sorted({a.stage for a in alone}))}
    renumbered = tuple(a._replace(stage=numbers[a.stage]) for a in alone)
    plan = add_offload(Plan((renumbered,)), depth=depth)
    computed_s = sum({Op.FORWARD: 1.0, Op.BACKWARD: 2.0}[a.op] for a in alone)

    stages = len(numbers)
    costs = replace(Costs.uniform(stages), offload_s=(0.75,) * stages, reload_s=(3.5,) * stages)
    waits = waits_s(plan.programs[0], measured, depth)
    assert waits > 5
    assert simulate(plan, costs).makespan_s == pytest.approx(computed_s + waits, rel=1e-12)


class VirtualDevice(Copies):
    """Copies that take time on a clock of their own, one stream for each way, beside compute."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, copy_s: float) -> None:
        super().__init__(CPU)
        self.now_s, self.waited_s, self.copy_s = 0.0, 0.0, copy_s
        self._free_s = dict.fromkeys(self._streams, 0.0)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)

    def compute(self, op: Op) -> None:
        self.now_s += 1.0 if op is Op.FORWARD else 2.0

    def wait(self, copied: Any) -> None:
        self.waited_s += max(0.0, copied - self.now_s)
        self.now_s = max(self.now_s, copied)

    def _copy(
        self,
        stream: Any,
        targets: Sequence[Tensor],
        sources: Sequence[Tensor],
        watch: Watch,
        ready: Any = None,
    ) -> Any:
        now_s = self.now_s
        self.now_s = max(now_s, self._free_s[stream])
        with watch():
            self.now_s += self.copy_s
        self._free_s[stream], self.now_s = self.now_s, now_s
        torch._foreach_copy_(targets, sources)
        return self._free_s[stream]


class Reloads(Events):
    """When each of them was over."""

    def __init__(self) -> None:
        self.over_s: dict[int | None, float] = {}

    def open_span(self, name: object, kind: str) -> Callable[[], None]:
        assert isinstance(name, Action)
        return lambda: self.over_s.update({name.microbatch: time.perf_counter()})


def iterate(
    offloads: Offloader, device: VirtualDevice, reloads: Reloads
) -> tuple[int, float, OffloadChoice]:
    """Run an iteration; returns what was late, how long compute waited, and what was chosen."""
    choice = offloads.choice(PROGRAM)
    program = offloaded(PROGRAM, choice)
    late, waited_s = 0, device.waited_s
    iteration: Any = SimpleNamespace(trains=True, program=program, chunks=(), hidden_bytes=64)
    offloads.prepare(iteration)
    losses: dict[int | None, Tensor] = {}
    for action in program:
        if action.op is Op.FORWARD:
            with offloads.saving(action):
                losses[action.microbatch] = torch.rand(64, requires_grad=True).exp().sum()
                device.compute(action.op)
        elif action.op is Op.BACKWARD:
            late += reloads.over_s.get(action.microbatch, 0.0) > device.now_s
            with offloads.using(action):
                losses.pop(action.microbatch).backward()
                device.compute(action.op)
        elif action.op is Op.OFFLOAD:
            offloads.offload(action, None)
        else:
            offloads.reload(action)
    assert (offloads.peak,) == peak_activations(
        add_offload(PLAN, depth=choice.depth, at_most=choice.at_most), depth=choice.depth
    )
    return late, device.waited_s - waited_s, choice


@pytest.mark.parametrize(
    ("copy_s", "spare", "sparing", "depth", "late"),
    [(0.5, 0, False, 1, 0), (2.5, 14, True, 3, 0), (2.5, 0, False, 1, 18)],
    ids=["fast", "slow, and memory for most", "slow, and no memory"],
)
def test_a_run_measures_chooses_and_is_as_fast_as_was_predicted(
    monkeypatch: pytest.MonkeyPatch, copy_s: float, spare: int, sparing: bool, depth: int, late: int
):
    monkeypatch.setattr(offloader, "free_device_bytes", lambda _: spare * 512 * 10 // 9 + spare)
    device = VirtualDevice(monkeypatch, copy_s)
    config = replace(CONFIG, offload_everything=True, saved_bytes=512)
    config = replace(config, offload_activations="auto" if sparing else "on")
    reloads = Reloads()
    offloads = Offloader(config, copies=device, recorder=reloads)
    assert [iterate(offloads, device, reloads)[2] for _ in range(2)] == [OffloadChoice()] * 2
    for _ in range(2):
        num_late, waited_s, choice = iterate(offloads, device, reloads)
        measured = replace(MEASURED, offload_s=copy_s, reload_s=copy_s)
        assert waited_s == pytest.approx(
            waits_s(offloaded(PROGRAM, choice), measured, choice.depth)
        )
        assert (choice.depth, num_late) == (depth, late)  # the last forward waits, and two arrive
    assert offloads.pool.num_growths == 1


def test_auto_keeps_on_the_device_what_the_host_has_no_room_for(monkeypatch, caplog):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 4 * 7 * 1000 * 10 // 9 + 1)
    config = replace(CONFIG, offload_activations="auto", saved_bytes=1000)
    assert Offloader(config, num_local=4).choice(PROGRAM) == OffloadChoice(7)
    assert "20 activations of 1,000 bytes should leave, the host has memory for 7" in caplog.text
    on = replace(config, offload_activations="on")  # an error, not less
    assert Offloader(on, num_local=4).choice(PROGRAM) == OffloadChoice()

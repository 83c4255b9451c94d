"""When ``--schedule auto`` times, compares and changes what runs; no process group is made."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.plan.ir import PlanError
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.policy.predicted import Predicted, Predictions
from megatron.fold3d.runtime import auto_schedule
from megatron.fold3d.runtime.auto_schedule import AutoSchedule
from megatron.fold3d.runtime.measure import timing
from tests.configs import configured

AUTO = configured(choice=Choice.plain("auto", num_segments=2), num_ranks=2)


def choice(schedule: str, m: int, *, defers: bool = False, seconds: float = 1.0) -> Predicted:
    order = build(schedule, num_ranks=2, num_segments=2, num_microbatches=m)
    word = f"{schedule}:step=next" if defers else schedule
    shares = (0.5,) * 4 if defers else ()
    return Predicted(job=Job.of(order, Choice.parse(word, 2), shares=shares), seconds=seconds)


class Search:
    """A search that a test says the end of."""

    def __init__(self, choices: list[Predicted]) -> None:
        self.found, self.has_ended, self.is_closed = Predictions(choices), True, False

    def answer(self) -> Predictions | None:
        return self.found if self.has_ended else None

    def close(self) -> None:
        self.is_closed = True


class Run:
    """A run whose iterations take what a test says, of which rank 0 is played."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, defers: bool = False, searches: bool = False
    ) -> None:
        self.now_s = 0.0
        self.deferred = SimpleNamespace(is_free=True, has_due=True)
        self.auto = AutoSchedule(
            AUTO,
            lambda *_, **__: pytest.fail("decided otherwise"),
            due=self.deferred if defers else None,
        )
        self.names: list[str] = []  # of what ran, iteration by iteration
        self.searches: list[Search] = []
        self._defers, self._goes_on = defers, searches
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now_s))
        monkeypatch.setattr(auto_schedule.dist, "all_reduce", lambda *_: None)
        monkeypatch.setattr(auto_schedule.dist, "get_rank", lambda: 0)
        monkeypatch.setattr(self.auto._recorder, "agreed", lambda _: "times")
        monkeypatch.setattr(auto_schedule.dist, "broadcast_object_list", lambda *_, **__: None)
        monkeypatch.setattr(self.auto, "search", self._search)

    def _search(self, _: Any, iteration: Any) -> None:
        m = iteration.plan.num_microbatches
        some = [choice("interleaved", m), choice("aiao", m, defers=self._defers), choice("afab", m)]
        search = Search(some)
        search.has_ended = not self._goes_on
        self.searches.append(search)
        auto: Any = self.auto
        auto._times, auto._running = "what it takes", search

    def iterate(
        self,
        seconds: float | dict[str, float],
        m: int = 4,
        *,
        taken: bool = True,
        ends: bool = True,
        waits: bool = False,
    ) -> str:
        """Run a training iteration; return what ran.

        Args:
            seconds: until the end of its step, by what runs.
            m: micro-batches.
            taken: whether the step is taken.
            ends: whether there is a step.
            waits: whether the step waits for all gradients, if any are left for the next iteration.
        """
        chosen = self.auto.decide(replace(AUTO.job, num_microbatches=m), 0)
        plan = chosen.computed
        iteration: Any = SimpleNamespace(trains=True, plan=plan, rank=0, device=torch.device("cpu"))
        self.auto.prepare(iteration)
        name = chosen.choice.schedule
        self.now_s += seconds[name] if isinstance(seconds, dict) else seconds
        if ends:
            self.auto.step(lambda: (taken,))
        if waits and chosen.choice.carries:
            self.deferred.is_free = False
        self.now_s += 100  # an evaluation, a checkpoint
        self.names.append(name)
        return name

    def iterations(self, count: int, seconds: float | dict[str, float]) -> list[str]:
        return [self.iterate(seconds) for _ in range(count)]


TRIED = ["interleaved"] * 4 + ["aiao"] * 3 + ["afab"] * 3


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(monkeypatch)


@pytest.mark.parametrize("fastest", ["interleaved", "aiao", "afab"])
def test_the_fastest_goes_on_from_the_eleventh_iteration(run: Run, fastest: str):
    seconds = {"interleaved": 2.0, "aiao": 2.1, "afab": 2.2} | {fastest: 1.0}
    assert run.iterations(10, seconds) == TRIED
    assert run.iterations(30, seconds) == [fastest] * 30


def test_of_equally_fast_ones_stocks_order_goes_on(run: Run):
    assert run.iterations(11, 1.0)[10:] == ["interleaved"]


@pytest.mark.parametrize("killed", [{"taken": False}, {"ends": False}])
def test_an_iteration_without_a_step_does_not_count(run: Run, killed: dict[str, bool]):
    """It is shorter, and would win."""
    seconds = {"interleaved": 1.0, "aiao": 2.0, "afab": 2.0}
    run.iterations(9, seconds)
    for _ in range(5):  # in place of the tenth
        assert run.iterate(0.1, **killed) == "afab"
    assert run.iterations(2, seconds) == ["afab", "interleaved"]


def test_a_slow_iteration_does_not_decide(run: Run):
    seconds = {"interleaved": 2.0, "aiao": 1.0, "afab": 3.0}
    run.iterations(5, seconds)
    run.iterate(60.0)  # a hiccup
    assert run.iterations(5, seconds)[-1] == "aiao"


def test_each_number_of_micro_batches_has_a_choice(run: Run):
    seconds = {"interleaved": 2.0, "aiao": 1.0, "afab": 3.0}
    run.iterations(6, seconds)
    assert run.iterate(seconds, m=2) == "interleaved"  # it changes in the middle of a trial
    assert run.iterations(6, seconds) == ["aiao"] * 2 + ["afab"] * 3 + ["aiao"]
    slower = {"interleaved": 1.0, "aiao": 2.0, "afab": 3.0}
    assert [run.iterate(slower, m=6) for _ in range(12)] == [*TRIED, *["interleaved"] * 2]
    assert run.iterate(seconds) == "aiao"  # as chosen
    assert run.iterate(seconds, m=6) == "interleaved"


SECONDS = {"interleaved": 2.0, "aiao": 1.0, "afab": 2.5}


def test_what_leaves_steps_due_is_tried_once_steps_are_not_clipped(monkeypatch: Any):
    run = Run(monkeypatch, defers=True)
    run.deferred.is_free = False
    stock = "interleaved"
    assert run.iterations(8, SECONDS) == [stock] * 4 + ["afab"] * 3 + [stock]
    run.deferred.is_free = True
    assert run.iterations(10, SECONDS) == ["aiao"] * 10


def test_what_leaves_steps_due_does_not_run_where_they_may_be_clipped(monkeypatch: Any):
    run = Run(monkeypatch, defers=True)
    assert run.iterations(20, SECONDS)[10:] == ["aiao"] * 10
    assert run.iterate(SECONDS, waits=True) == "aiao"
    assert run.iterations(5, SECONDS) == ["interleaved"] * 5
    run.deferred.is_free = True
    assert run.iterations(5, SECONDS) == ["aiao"] * 5


def test_a_step_that_waits_for_all_gradients_interrupts_the_trial(monkeypatch: Any):
    run = Run(monkeypatch, defers=True)
    run.iterations(5, SECONDS)
    assert run.iterate(0.1, waits=True) == "aiao"  # its time does not count
    assert run.iterations(4, SECONDS) == ["afab"] * 3 + ["interleaved"]
    run.deferred.is_free = True
    slow = SECONDS | {"aiao": 3.0}
    assert run.iterations(4, slow) == ["aiao"] * 3 + ["interleaved"]


def test_an_iteration_behind_an_evaluation_does_not_count_where_steps_were_due(monkeypatch: Any):
    run = Run(monkeypatch, defers=True)
    seconds = {"interleaved": 2.0, "aiao": 3.0, "afab": 4.0}
    run.iterations(5, seconds)
    run.deferred.has_due = False  # its steps were taken before the evaluation
    assert run.iterate(0.5) == "aiao"
    assert run.iterate(0.5) == "aiao"
    run.deferred.has_due = True
    assert run.iterations(6, seconds) == ["aiao"] * 2 + ["afab"] * 3 + ["interleaved"]


def test_evaluations_behind_each_iteration_do_not_keep_the_trial_from_its_end(monkeypatch: Any):
    run = Run(monkeypatch, defers=True)
    run.iterations(4, SECONDS)
    run.deferred.has_due = False
    assert run.iterations(10, SECONDS) == ["aiao"] * 6 + ["afab"] * 3 + ["aiao"]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), PlanError("no plan")])
def test_an_error_of_what_is_tried_names_it_and_how_to_train_without_it(run: Run, error: Exception):
    run.iterations(4, 1.0)
    run.auto.close(error)
    assert not hasattr(error, "__notes__")  # the first choice is the user's
    assert run.iterate(1.0) == "aiao"
    run.auto.close(error)
    assert error.__notes__ == [
        "--schedule auto was running aiao; give --schedule interleaved to train without it"
    ]
    other = RuntimeError("a link is down")
    run.auto.close(other)
    assert not hasattr(other, "__notes__")


def test_training_goes_on_until_the_search_has_ended(monkeypatch: pytest.MonkeyPatch):
    run = Run(monkeypatch, searches=True)
    assert run.iterations(50, SECONDS) == ["interleaved"] * 50
    (search,) = run.searches
    assert not search.is_closed
    search.has_ended = True
    assert run.iterations(9, SECONDS) == [*TRIED[2:], "aiao"]
    assert search.is_closed


def test_another_number_of_micro_batches_ends_the_search(monkeypatch: pytest.MonkeyPatch):
    run = Run(monkeypatch, searches=True)
    run.iterations(4, SECONDS)
    run.iterate(SECONDS, m=2)
    (search,) = run.searches
    assert search.is_closed
    run.iterations(4, SECONDS)
    assert len(run.searches) == 2  # its own times are measured again


def test_the_end_of_a_run_ends_the_search(monkeypatch: pytest.MonkeyPatch):
    run = Run(monkeypatch, searches=True)
    run.iterations(3, SECONDS)
    run.auto.close(None)
    assert run.searches[0].is_closed


def test_one_table_says_what_was_measured_predicted_tried_and_kept(
    run: Run, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level("INFO"):
        run.iterations(11, SECONDS)
    assert [record.getMessage().splitlines() for record in caplog.records] == [
        [
            "--schedule auto measured what it takes",
            "  choice       predicted  took",
            "  interleaved  1 s        2 s",
            "  aiao         1 s        1 s    kept after 10 iterations",
            "  afab         1 s        2.5 s",
        ]
    ]


@pytest.mark.parametrize(("sharded_s", "tells"), [(0.9, True), (0.99, False)])
def test_the_distributed_optimizer_is_advised_where_it_gains(
    sharded_s: float, tells: bool, caplog: pytest.LogCaptureFixture
):
    predicted = [
        choice("interleaved", 4),
        choice("aiao", 4, defers=True, seconds=0.5),  # its steps would wait
    ]
    sharded = choice("interleaved", 4, seconds=sharded_s)
    with caplog.at_level("INFO"):
        auto_schedule._advise_sharding(predicted, sharded)
    assert ("--use-distributed-optimizer" in caplog.text) is tells

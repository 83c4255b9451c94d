"""A run's search beside its ranks."""

import multiprocessing
import time
from dataclasses import replace
from math import inf
from multiprocessing.connection import Connection
from typing import Any

import pytest

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.policy.predicted import Predictions
from megatron.fold3d.predict.search.measured_search import predictions
from megatron.fold3d.training.search_process import SearchProcess
from tests.distributed import is_running
from tests.predict.search.test_measured_search import GAPS, TIMES

pytestmark = pytest.mark.processes

JOB = Job(choice=Choice.parse("1f1b:wgrad=gaps", 1), num_ranks=4, num_microbatches=8)
QUESTION: dict[str, Any] = {"times": TIMES, "job": JOB, "free": GAPS, "frees_ahead": True}


def ended(search: SearchProcess) -> Predictions:
    for _ in range(600):
        if (found := search.answer()) is not None:
            search.close()
            return found
        time.sleep(0.1)
    raise AssertionError("the search goes on")


def test_the_answer_is_that_of_a_search_in_this_process():
    search = SearchProcess(**QUESTION)
    assert search.answer() is None
    found = ended(search)
    assert found == predictions(**QUESTION)
    tried = [str(one.choice) for one in found.choices]
    assert tried == ["1f1b:wgrad=gaps", "1f1b:wgrad=gaps:ahead=2"]


def test_a_search_that_fails_leaves_the_first_choice(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
):
    (kept,) = ended(SearchProcess(**QUESTION | {"free": None})).choices
    assert (kept.job, kept.seconds) == (JOB, inf)
    assert "the search of choices has failed (1): none is tried" in caplog.text
    assert "Traceback" in capfd.readouterr().err


def test_a_search_can_be_ended():
    search = SearchProcess(**QUESTION)
    search.close()
    assert search._process.returncode == -9


def test_a_search_ends_with_its_rank():
    receiver, sender = multiprocessing.Pipe(duplex=False)
    rank = multiprocessing.get_context("spawn").Process(target=_search_for_long, args=(sender,))
    rank.start()
    search = receiver.recv()
    rank.kill()
    rank.join()
    for _ in range(50):
        if not is_running(search):
            return
        time.sleep(0.1)
    raise AssertionError("the search goes on")


def _search_for_long(sender: Connection) -> None:
    search = SearchProcess(**QUESTION | {"job": replace(JOB, num_microbatches=8192)})
    sender.send(search._process.pid)
    time.sleep(60)

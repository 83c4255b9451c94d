from dataclasses import replace
from math import sqrt
from random import Random

import pytest

from megatron.fold3d.predict.cost_model.cluster import NODES, cluster
from megatron.fold3d.predict.cost_model.goodput import daly_interval_s, goodput, progress
from megatron.fold3d.predict.cost_model.model_shape import model_shape
from megatron.fold3d.predict.cost_model.sizes import Setup


def test_a_cluster_that_never_fails_has_no_goodput():
    assert goodput(model_shape("gpt3-175b"), NODES["h100"], Setup()) is None


def test_checkpoints_hold_weights_and_optimizer_and_failures_come_more_often_to_more_gpus():
    found = goodput(model_shape("llama3-405b"), cluster("llama3-h100x16384"), Setup())
    assert found is not None
    assert found.failures_s == pytest.approx(54 * 86_400 / 419)
    assert found.checkpoint_s == pytest.approx(14 * 405.85e9 / 2e12, rel=1e-4)
    assert 0.9 < found.share < 0.95  # "higher than 90% effective training time", Sec. 3.3
    assert goodput(model_shape("llama3-405b"), cluster("llama3-h100x16384"), Setup(), 60.0) != found


@pytest.mark.parametrize("checkpoint_s", [1.0, 30.0, 600.0])
def test_daly_interval_makes_nearly_the_most_progress(checkpoint_s: float):
    def share(interval_s: float) -> float:
        return progress(10_000.0, checkpoint_s, 600.0, interval_s)

    interval_s = daly_interval_s(10_000.0, checkpoint_s)
    best = max(share(interval_s * (0.5 + i / 1000)) for i in range(1000))
    assert share(interval_s) == pytest.approx(best, rel=1e-5)
    assert interval_s == pytest.approx(sqrt(2 * checkpoint_s * 10_000.0), rel=0.2)  # Young's
    assert daly_interval_s(10.0, 30.0) == 10.0


def test_progress_is_what_a_job_that_fails_at_random_makes():
    random, failures_s, checkpoint_s, restart_s, interval_s = Random(1), 500.0, 20.0, 60.0, 140.0
    spent_s, rounds = 0.0, 20_000
    for _ in range(rounds):
        while True:  # what is lost is computed again, once a restart is through
            if (fails_s := random.expovariate(1 / failures_s)) > interval_s + checkpoint_s:
                spent_s += interval_s + checkpoint_s
                break
            spent_s += fails_s
            while (fails_s := random.expovariate(1 / failures_s)) < restart_s:
                spent_s += fails_s
            spent_s += restart_s
    found = progress(failures_s, checkpoint_s, restart_s, interval_s)
    assert found == pytest.approx(rounds * interval_s / spent_s, rel=0.01)  # of 20,000 rounds


def test_even_a_job_that_never_gets_anywhere_has_a_goodput():
    assert progress(1.0, 10_000.0, 0.0, 10_000.0) == 0.0


def test_failures_without_storage_are_refused():
    with pytest.raises(ValueError, match=r"gpu_mtbf_s=5\.0 without storage_bytes_per_s"):
        replace(NODES["h100"], gpu_mtbf_s=5.0)

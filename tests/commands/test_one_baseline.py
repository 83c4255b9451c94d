"""`search`, `simulate` and ``--check`` compare with one strongest stock: the best in a layout."""

import json
from itertools import product

import pytest

from megatron.fold3d.commands.cost_sources import on_cluster
from megatron.fold3d.commands.job import config_of, run_of
from megatron.fold3d.commands.megatron_flags import described
from megatron.fold3d.predict.cost_model.cluster import Cluster
from megatron.fold3d.predict.cost_model.cluster import cluster as gpus_of
from megatron.fold3d.predict.search.planner import strongest_stock
from megatron.fold3d.predict.search.search_result import JudgedCandidate

MODELS = "12-1024-16-512", "24-2048-16-1024"
CLUSTERS = "a100x16-50g", "a100x32-100g", "v100x32-25g"
SIZES = (1, 4, 1), (2, 2, 2), (4, 2, 4), (2, 4, 1)  # tensor and pipeline ranks, micro-batch
JOBS = [
    pytest.param(*job, marks=[pytest.mark.stress] if number > 1 else [])
    for number, job in enumerate([*product(MODELS, CLUSTERS, SIZES)][:20])
]


@pytest.mark.search
@pytest.mark.parametrize(("model", "cluster", "sizes"), JOBS)
def test_search_simulate_and_check_name_the_same_strongest_stock(fold3d, model, cluster, sizes):
    tp, pp, size = sizes
    layout = f"--model {model} --cluster {cluster} --tp {tp} --pp {pp} --micro-batch-size {size}"
    layout += " --global-batch-size 128 --json"
    code, out, err = fold3d(f"search {layout}")
    assert code == 0, err
    best = json.loads(out)["same_layout"]
    code, out, err = fold3d(f"simulate --schedule auto --segments 3 {layout} -- --bf16")
    assert code == 0, err
    simulated = json.loads(out)["same_layout"]
    assert simulated["seconds"] == best["iteration_s"]
    checked = named_by_check(
        f"--model-preset {model} --tensor-model-parallel-size {tp} --micro-batch-size {size} "
        f"--pipeline-model-parallel-size {pp} --global-batch-size 128 --bf16",
        gpus_of(cluster),
    )
    assert checked.iteration_s == best["iteration_s"]
    assert checked.candidate.name == simulated["schedule"]


def named_by_check(flags: str, gpus: Cluster) -> JudgedCandidate:
    """Return the strongest stock of a run, asked as ``--check`` asks."""
    found = described([*flags.split(), "--schedule", "auto", "--segments", "3"])
    run = run_of(
        found.args, config_of(found, gpus), on_cluster(found.model(), gpus), found.model(), gpus
    )
    alike = strongest_stock(found.model(), gpus, run.settled().candidate)
    assert alike is not None
    return alike

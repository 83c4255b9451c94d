"""`search` and `simulate` compare with one strongest stock: the best in a layout."""

import json
from itertools import product
from typing import Any

import pytest

MODELS = "12-1024-16-512", "24-2048-16-1024"
CLUSTERS = "a100x16-50g", "a100x32-100g", "v100x32-25g"
SIZES = (1, 4, 1), (2, 2, 2), (4, 2, 4), (2, 4, 1)  # tensor and pipeline ranks, micro-batch
JOBS = [
    pytest.param(*job, marks=[pytest.mark.stress] if number > 1 else [])
    for number, job in enumerate([*product(MODELS, CLUSTERS, SIZES)][:20])
]


@pytest.mark.search
@pytest.mark.parametrize(("model", "cluster", "sizes"), JOBS)
def test_search_and_simulate_name_the_same_strongest_stock(
    fold3d: Any, model: str, cluster: str, sizes: tuple[int, int, int]
):
    tp, pp, size = sizes
    layout = f"--model {model} --cluster {cluster} --tp {tp} --pp {pp} --micro-batch-size {size}"
    layout += " --global-batch-size 128 --json"
    code, out, err = fold3d(f"search {layout}")
    assert code == 0, err
    best = json.loads(out)["same_layout"]
    code, out, err = fold3d(f"simulate --schedule auto --segments 3 {layout} -- --bf16")
    assert code == 0, err
    assert json.loads(out)["same_layout"]["seconds"] == best["iteration_s"]

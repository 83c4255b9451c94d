"""``--segments auto`` measures once, in processes that leave nothing behind."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.fold3d.training.auto_segments import measure
from tests.distributed import run_distributed
from tests.end_to_end.test_own_script import changed, run_recorded
from tests.end_to_end.training import TINY, Record, differences, train

pytestmark = pytest.mark.gloo

MODEL = (
    f"{TINY} --schedule aiao --num-layers 8 --global-batch-size 4 "
    "--pipeline-model-parallel-size 2 --train-iters 3 --lr 1e-2 --eval-iters 1 --eval-interval 1000"
)
TOKENIZER = ("--tokenizer-type", "NullTokenizer")


def test_a_choice_is_measured_once_and_measuring_changes_no_result(tmp_path: Path) -> None:
    auto = shlex.split(f"{MODEL} --segments auto")
    script = changed("Your own script", tmp_path)  # with flags of its own, and defaults
    own = [word for word in auto if word not in ("--mock-data", *TOKENIZER)] + ["--focus", "1.5"]
    measured = run_distributed(train_with_cache, 2, own, tmp_path, script, timeout_s=250)
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "fold3d").iterdir()}
    assert len([path for path in kept if "costs" not in path.name]) == 1
    known = run_distributed(train_with_cache, 2, own, tmp_path, script)
    # The same measurement serves pretrain_gpt.py, whose stages may get unequal numbers of layers.
    run_distributed(train_with_cache, 2, auto, tmp_path, None)
    of_layer = next(path for path in kept if "costs" not in path.name)
    assert of_layer.stat().st_mtime_ns == kept[of_layer]

    assert len({num_segments for num_segments, _ in (*measured, *known)}) == 1
    records = [[record for _, record in run] for run in (measured, known)]
    assert differences(*records) == []


def test_auto_segments_that_cannot_measure_names_the_reason() -> None:
    with pytest.raises(ValueError, match=r"cannot be measured: .*int value: 'x'; give --segments"):
        measure(["--device", "cpu", "--num-layers", "x"], {})


def train_with_cache(argv: Sequence[str], cache: Path, script: Path | None) -> tuple[int, Record]:
    """Train with a cache of its own; with the number of segments that was trained.

    Args:
        script: a user's, instead of ``pretrain_gpt.py``.
    """
    from megatron.training import get_args

    os.environ["XDG_CACHE_HOME"] = str(cache)
    record = train(argv) if script is None else run_recorded(str(script), argv)
    return get_args().virtual_pipeline_model_parallel_size or 1, record

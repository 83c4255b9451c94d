"""A checkpoint is a state of training, whichever schedule wrote it or goes on from it."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.end_to_end.test_equal_to_stock import OVERLAP, UNTIED, Row
from tests.end_to_end.training import differences, merged, train

pytestmark = pytest.mark.gloo

STOCK, AIAO = "--schedule stock", "--schedule aiao"


@pytest.mark.parametrize(("saves", "resumes"), [(AIAO, STOCK), (STOCK, AIAO), (AIAO, AIAO)])
@pytest.mark.parametrize(
    "row",
    [
        Row(segments=2),
        Row(name="distributed optimizer", segments=2, dp=2, flags=f"{OVERLAP} --bf16"),
    ],
    ids=str,
)
def test_a_resumed_run_ends_as_the_uninterrupted_one(
    row: Row, saves: str, resumes: str, tmp_path: Path
) -> None:
    whole = run_distributed(
        train, row.num_ranks, row.command(f"{saves} --save {tmp_path} --save-interval 2")
    )
    resumed = run_distributed(
        train, row.num_ranks, row.command(f"{resumes} --load {tmp_path} --ckpt-step 2")
    )

    assert len(resumed[0].iterations) == 2
    for record in whole:
        del record.iterations[:2]
    assert differences(resumed, whole) == []


@pytest.mark.parametrize("schedule", ["aiao", "interleaved"])
def test_fewer_micro_batches_than_ranks_in_segments_go_on_as_stock_would_in_one(
    schedule: str, tmp_path: Path
) -> None:
    # Stock's interleaved schedule refuses m < pp, in training and in evaluation; its 1F1B does
    # not. Other chunks draw other weights, so both start from a checkpoint, and they sum the norm
    # in another order, so it clips nothing; layers are compared by their number in the model.
    row = Row(pp=4, segments=1, m=2, flags=f"{UNTIED} --clip-grad 0")
    saving = row.command(f"{STOCK} --save {tmp_path} --save-interval 2")
    resuming = replace(row, segments=2).command(
        f"--schedule {schedule} --load {tmp_path} --ckpt-step 2"
    )
    whole = run_distributed(train, 4, saving)
    resumed = run_distributed(train, 4, resuming)

    for record in whole:
        del record.iterations[:2]
    assert merged(resumed) == merged(whole)

"""A checkpoint is a state of training, whichever schedule wrote it or goes on from it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.distributed import run_distributed
from tests.end_to_end.test_equal_to_stock import OVERLAP, UNTIED, ZERO, Row
from tests.end_to_end.test_param_shards import train_poisoned
from tests.end_to_end.training import as_known, differences, merged, since, train

pytestmark = pytest.mark.gloo

STOCK, AIAO = "--schedule stock", "--schedule aiao"
UNCLIPPED, OLD = "--clip-grad 0", "--ckpt-format torch"

DELTA = "--delta-param-gather on"
ROWS = (Row(), Row(dp=2, flags=f"{OVERLAP} --bf16 --async-save --ckpt-fully-parallel-load"))
# Freed parameters and gradients are unusable.
IN_SHARDS = Row(
    segments=3,
    dp=2,
    m=2,
    flags=f"{OVERLAP} --bf16 --num-layers 6 --async-save",
    reference=train_poisoned,
)
ALONE = Row(pp=1, dp=2, m=2, flags=f"{OVERLAP} --bf16", segments=1)
CODED = Row(dp=2, flags=f"{OVERLAP} --bf16")
# Steps of which a part is due when the checkpoint is taken.
LATE = Row(dp=2, flags=f"--overlap-grad-reduce --bf16 {UNCLIPPED}")
LATE_ALONE = replace(ALONE, flags=f"{ALONE.flags} {UNCLIPPED}")
LATE_AS_OLD = replace(LATE_ALONE, flags=f"{ZERO} --overlap-grad-reduce --bf16 {OLD} {UNCLIPPED}")
LATER = "--schedule 1f1b:step=next:share=0.5"
SHARDS = f"{AIAO} --shard-segments gradients"
REPLICATED = "--schedule 1f1b:optimizer=replicated@0"
CASES = (
    (ROWS[0], AIAO, STOCK),
    *((ROWS[1], *pair) for pair in ((AIAO, STOCK), (STOCK, AIAO))),
    (Row(flags=OLD), AIAO, STOCK),
    (Row(flags=ZERO, segments=1), STOCK, STOCK),  # in 32 bits, on CPUs
    *((IN_SHARDS, *pair) for pair in ((SHARDS, STOCK), (STOCK, SHARDS))),
    *((ALONE, *pair) for pair in ((REPLICATED, STOCK), (STOCK, REPLICATED))),
    (LATE, "--schedule aiao:step=next:share=0.5", STOCK),
    (LATE_ALONE, STOCK, LATER),
    (LATE_AS_OLD, LATER, STOCK),
    (CODED, STOCK, f"{AIAO} {DELTA}"),
    (CODED, f"{AIAO} {DELTA}", f"{STOCK} {DELTA}"),
)


def saving(row: Row, schedule: str, folder: Path) -> tuple[str, ...]:
    return row.command(f"{schedule} --save {folder} --save-interval 2")


def resuming(row: Row, schedule: str, folder: Path) -> tuple[str, ...]:
    step = "" if OLD in row.flags else "--ckpt-step 2"  # it is for weights alone there
    return row.command(f"{schedule} --load {folder} {step}")


@pytest.mark.parametrize(("row", "saves", "resumes"), CASES, ids=str)
def test_a_resumed_run_ends_as_the_uninterrupted_one(
    row: Row, saves: str, resumes: str, tmp_path: Path
) -> None:
    """One saves after two of four iterations, and another goes on from there."""
    whole = run_distributed(row.reference, row.num_ranks, saving(row, saves, tmp_path))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = run_distributed(row.reference, row.num_ranks, resuming(row, resumes, tmp_path))
    assert len(resumed[0].iterations) == 2
    rest = since(2, whole)
    if "step=next" in saves + resumes:  # then norms are known later
        resumed, rest = as_known(rest, resumed), as_known(resumed, rest)
    assert differences(resumed, rest) == []


# Where they are aligned, stock reduces all segments but the last into shards, and saves those.
SAVES_GRADIENTS = Row(dp=2, m=2, flags=f"{OVERLAP} --no-align-grad-reduce --save-wgrads-interval 2")


def test_saved_weight_gradients_are_those_of_stock(tmp_path: Path) -> None:
    row = SAVES_GRADIENTS
    for schedule, folder in ((AIAO, tmp_path / "ours"), (STOCK, tmp_path / "stock")):
        run_distributed(train, row.num_ranks, saving(row, schedule, folder))

    files = sorted((tmp_path / "ours" / "wgrads").rglob("*.pth"))
    assert len(files) == 4  # two ranks, in iterations 2 and 4
    for file in files:
        ours, stock = (
            torch.load(tmp_path / run / file.relative_to(tmp_path / "ours"))
            for run in ("ours", "stock")
        )
        assert [*ours] == [*stock] == ["model_chunk0", "model_chunk1"]
        for chunk in ours:
            assert ours[chunk].keys() == stock[chunk].keys() != set()
            assert all(torch.equal(ours[chunk][name], stock[chunk][name]) for name in ours[chunk])


def test_fewer_micro_batches_than_ranks_in_segments_go_on_as_stock_would_in_one(
    tmp_path: Path,
) -> None:
    # Stock's interleaved schedule refuses m < pp, in training and in evaluation; its 1F1B does
    # not. Other chunks draw other weights, so both start from a checkpoint, and they sum the norm
    # in another order, so it clips nothing; layers are compared by their number in the model.
    row = Row(pp=4, segments=1, m=2, flags=f"{UNTIED} --clip-grad 0 --num-layers 8")
    whole = run_distributed(train, 4, saving(row, STOCK, tmp_path))
    resumed = run_distributed(train, 4, resuming(replace(row, segments=2), AIAO, tmp_path))

    assert merged(resumed) == merged(since(2, whole))


KNOWS_ITS_SIZES = Row(word="aiao:wgrad=last@1 --lazy-inter-segment")
SIZES = (
    *("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length"),
    *("--max-position-embeddings", "--pipeline-model-parallel-size"),
    "--tensor-model-parallel-size",
)


def without_sizes(row: Row, folder: Path) -> tuple[str, ...]:
    """The command that resumes with the sizes of the checkpoint in ``folder``."""
    load = f"--load {folder} --ckpt-step 2"
    words = list(row.command(f"{row.ours} {load} --use-checkpoint-args"))
    for flag in SIZES:
        at = words.index(flag)
        del words[at : at + 2]
    return (*words, "--use-mp-args-from-checkpoint-args")


def test_sizes_that_only_the_checkpoint_knows_are_those_of_the_run(tmp_path: Path) -> None:
    row = KNOWS_ITS_SIZES
    whole = run_distributed(train, 2, saving(row, row.ours, tmp_path))
    resumed = run_distributed(train, 2, without_sizes(row, tmp_path))

    assert differences(resumed, since(2, whole)) == []

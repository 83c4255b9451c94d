"""What Megatron would lose of a run's state is refused before the run has any."""

from argparse import ArgumentParser

import pytest

from megatron.fold3d.config.run_folders import format_problems

SAVE = "--save DIR --save-interval 2"
ZERO = "--use-distributed-optimizer"
MTP = "--mtp-num-layers 1 --pipeline-model-parallel-size 2"
OLD = "--ckpt-format torch"


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        (f"--optimizer sgd {ZERO}", "drop one of the two"),
        (f"--optimizer sgd {SAVE}", "give --ckpt-format torch, or --no-save-optim"),
        ("--optimizer sgd --load DIR", "give --ckpt-format torch, or --no-load-optim"),
        (f"{MTP} {SAVE}", "give --untie-embeddings-and-output-weights, or --ckpt-format torch"),
        (f"{ZERO} {OLD} --load DIR --ckpt-step 2", "write 2 into latest_checkpointed_iteration"),
    ],
)
def test_what_would_be_lost_is_refused(parser: ArgumentParser, flags: str, fix: str) -> None:
    (problem,) = format_problems(parser.parse_args(flags.split()))
    assert fix in problem


@pytest.mark.parametrize(
    "flags",
    [
        SAVE,
        "--optimizer sgd",
        f"--optimizer sgd {SAVE} {OLD}",
        f"--optimizer sgd {SAVE} --no-save-optim",
        "--optimizer sgd --load DIR --no-load-optim",
        f"{MTP} {SAVE} {OLD}",
        f"{MTP} {SAVE} --untie-embeddings-and-output-weights",
        f"--mtp-num-layers 1 {SAVE}",
        f"{ZERO} --load DIR --ckpt-step 2",
        f"{OLD} --load DIR --ckpt-step 2",
        f"{ZERO} {OLD} --load DIR",
    ],
)
def test_what_is_kept_is_not(parser: ArgumentParser, flags: str) -> None:
    assert [*format_problems(parser.parse_args(flags.split()))] == []

"""Which runs cut every segment into buckets."""

from argparse import ArgumentParser

import pytest

from megatron.fold3d.config.fold3d_config import Fold3DConfig

OVERLAP = "--num-layers 8 --schedule aiao --overlap-grad-reduce"
ZERO = f"{OVERLAP} --use-distributed-optimizer"


@pytest.mark.parametrize(
    ("flags", "cuts"),
    [
        ("--num-layers 8 --schedule aiao", False),
        (OVERLAP, True),
        (f"{OVERLAP} --no-align-grad-reduce", True),
        (ZERO, False),
    ],
)
def test_segments_are_cut_where_no_checkpoint_depends_on_it(
    parser: ArgumentParser, flags: str, cuts: bool
) -> None:
    args = parser.parse_args(flags.split())
    assert Fold3DConfig.from_args(args).cuts_every_segment is cuts


@pytest.mark.parametrize(
    ("flags", "gathers"), [("", True), ("--no-align-param-gather", False)], ids=["plan", "hooks"]
)
def test_the_plan_gathers_parameters_unless_hooks_do(
    parser: ArgumentParser, flags: str, gathers: bool
) -> None:
    args = parser.parse_args(f"{ZERO} --overlap-param-gather {flags}".split())
    assert Fold3DConfig.from_args(args).gathers_params is gathers
    assert not Fold3DConfig.from_args(parser.parse_args(ZERO.split())).gathers_params

"""What ``step=next`` refuses, and for which stages it works."""

import pytest

from megatron.fold3d.config.read_config import read_config

NEEDED = "--schedule aiao:step=next:share=0.5 --overlap-grad-reduce"
MORE = "--schedule aiao"
SHARDED = f"{NEEDED} --schedule aiao:step=next --use-distributed-optimizer --segments 2"
DELAYED = (
    "--schedule aiao:step=next:wgrad=last@1 --transformer-impl local "
    "--no-gradient-accumulation-fusion"
)


@pytest.mark.parametrize(
    ("line", "share", "auto", "stages"),
    [
        ("--segments 2", None, set(), ()),  # nothing is deferred unless asked for
        (f"{NEEDED} --schedule aiao:step=next:share=0", 0.0, set(), (0,)),
        (f"{NEEDED} --segments 2", 0.5, set(), (0, 1)),
        (f"{NEEDED} --pipeline-model-parallel-size 1", 0.5, set(), (0,)),
        (f"{NEEDED} --schedule aiao:step=next:share=1", 1.0, set(), (0,)),
        (f"{NEEDED} --schedule aiao:step=next", None, {"share"}, (0,)),
        # Of the distributed optimizer all is, unless weight gradients are delayed.
        (SHARDED, 1.0, set(), (0, 1)),
        (f"{SHARDED} {DELAYED}", None, {"share"}, (0, 1)),
    ],
)
def test_a_share_of_all_stages_is_deferred_as_the_word_says_or_as_measured(
    config, line, share, auto, stages
):
    found = config(line)
    assert (found.choice.share, found.auto) == (share, auto)
    assert found.choice.where(step="next") == stages
    assert found.choice.carries is bool(stages)


def test_steps_depend_on_gradients_with_a_norm_above_which_they_are_skipped(parse):
    args = parse(f"{NEEDED} --clip-grad 0")
    args.grad_norm_skip_threshold = 2.0
    assert read_config(args).clips_or_scales


SHARE = "it is a share of DP.sync; give a number from 0 to 1"
SMALL = "a slice this small costs more to send than it carries; give at least 4096"


@pytest.mark.parametrize(
    ("part", "found"),
    [
        ("step=next:share=-0.1", f"share=-0.1: {SHARE}"),
        ("step=next:share=1.5", f"share=1.5: {SHARE}"),
        ("step=next:slice-bytes=4095", f"slice-bytes=4095: {SMALL}"),
        ("step=next:slice-bytes=0", f"slice-bytes=0: {SMALL}"),
        ("step=next:slice-bytes=-1", f"slice-bytes=-1: {SMALL}"),
        (
            "slice-bytes=65536",
            "slice-bytes=65536 without step=next: DP.sync is Megatron's, in buckets; add "
            "step=next, or give --ddp-bucket-size",
        ),
    ],
)
def test_parts_that_cannot_be_are_refused(problem, part: str, found: str):
    assert problem(f"{NEEDED} --schedule aiao:{part}") == found

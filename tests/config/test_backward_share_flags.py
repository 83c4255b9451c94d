"""What ``step=next`` refuses, and for which stages it works."""

from argparse import Namespace

import pytest

from megatron.fold3d.config.read_config import read_config
from tests.config.conftest import Parse

NEEDED = "--schedule aiao:step=next:share=0.5 --overlap-grad-reduce"

MORE = "--schedule aiao"


def problems(args: Namespace) -> list[str]:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  # the caller looks at every line
        read_config(args)
    return str(raised.value).splitlines()


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_share_from_0_to_1_is_taken(parse: Parse, share: float) -> None:
    config = read_config(parse(f"{NEEDED} --schedule aiao:step=next:share={share}"))
    assert (config.choice.share, config.choice.carries) == (share, True)


def test_a_share_is_measured_unless_the_word_says_it(parse: Parse) -> None:
    config = read_config(parse(f"{NEEDED} --schedule aiao:step=next"))
    assert (config.choice.share, config.auto) == (None, {"share"})


def test_an_automatic_share_of_the_distributed_optimizer_is_all_unless_weights_are_delayed(
    parse: Parse,
) -> None:
    sharded = f"{NEEDED} --schedule aiao:step=next --use-distributed-optimizer --segments 2"
    config = read_config(parse(sharded))
    assert (config.choice.share, config.auto) == (1.0, set())
    delayed = (
        "--schedule aiao:step=next:wgrad=last@1 --transformer-impl local "
        "--no-gradient-accumulation-fusion"
    )
    config = read_config(parse(f"{sharded} {delayed}"))
    assert (config.choice.share, config.auto) == (None, {"share"})
    assert not read_config(parse(NEEDED)).auto


@pytest.mark.parametrize("share", ["-0.1", "1.5"])
def test_backward_share_outside_0_to_1_is_refused(parse: Parse, share: str) -> None:
    (problem,) = problems(parse(f"{NEEDED} --schedule aiao:step=next:share={share}"))
    assert problem == (f"share={share}: it is a share of DP.sync; give a number from 0 to 1")


def test_nothing_is_deferred_unless_asked_for(parse: Parse) -> None:
    config = read_config(parse("--segments 2"))
    assert (config.choice.share, config.choice.carries) == (None, False)


def test_backward_share_defers_all_stages(parse: Parse) -> None:
    both = read_config(parse(f"{NEEDED} --segments 2"))
    assert both.choice.where(step="next") == (0, 1)
    alone = read_config(parse(f"{NEEDED} --pipeline-model-parallel-size 1"))
    assert alone.choice.where(step="next") == (0,)


@pytest.mark.parametrize(
    ("flags", "conditional"),
    [
        ("", True),
        ("--clip-grad 0", False),
        ("--clip-grad 0 --bf16", False),
        ("--clip-grad 0 --fp16", True),
        ("--clip-grad 0 --bf16 --loss-scale 2", True),
    ],
)
def test_steps_depend_on_gradients_with_clipping_and_with_a_loss_scaler(
    parse: Parse, flags: str, conditional: bool
) -> None:
    assert read_config(parse(f"{NEEDED} {flags}")).clips_or_scales is conditional


def test_steps_depend_on_gradients_with_a_norm_above_which_they_are_skipped(parse: Parse) -> None:
    args = parse(f"{NEEDED} --clip-grad 0")
    args.grad_norm_skip_threshold = 2.0
    assert read_config(args).clips_or_scales


def test_slices_are_small_on_cpus_unless_told_otherwise(parse: Parse) -> None:
    def slice_bytes(flags: str) -> int:
        return read_config(parse(f"{NEEDED} {flags}")).slice_bytes

    assert slice_bytes("") == 8 << 20
    assert slice_bytes("--device cpu") == 1 << 19
    assert slice_bytes("--device cpu --schedule aiao:step=next:slice-bytes=65536") == 65536


@pytest.mark.parametrize("slice_bytes", [4095, 0, -1])
def test_slices_that_cost_more_than_they_carry_are_refused(parse: Parse, slice_bytes: int) -> None:
    (problem,) = problems(parse(f"{NEEDED} --schedule aiao:step=next:slice-bytes={slice_bytes}"))
    assert problem == (
        f"slice-bytes={slice_bytes}: a slice this small costs more to send than it carries; "
        "give at least 4096"
    )


def test_only_deferred_gradients_are_sliced(parse: Parse) -> None:
    (problem,) = problems(parse("--schedule aiao:slice-bytes=65536"))
    assert problem == (
        "slice-bytes=65536 without step=next: DP.sync is Megatron's, in buckets; add "
        "step=next, or give --ddp-bucket-size"
    )

"""What ``--recompute-layers`` accepts."""

from argparse import ArgumentError

import pytest

from megatron.fold3d.config.all_flags import megatron_defaults

AIAO = "--schedule aiao --segments 2"


def test_it_stands_for_megatrons_flags(parse):
    assert megatron_defaults(parse(f"{AIAO} --recompute-layers 2,0,1,0")) == {
        "num_virtual_stages_per_pipeline_rank": 2,
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 2,
    }
    auto = parse(f"{AIAO} --recompute-layers auto")
    assert megatron_defaults(auto)["recompute_num_layers"] == 1


ONES = "--recompute-layers 1,1,1,1"
BYTES = "--activation-memory-bytes"


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("--recompute-layers 1,1,1", "--recompute-layers 1,1,1: these are 3 numbers"),
        ("--recompute-layers 1,3,1,1", "--recompute-layers 1,3,1,1: 3 layers of stage 1 are to be"),
        (f"{ONES} --recompute-activations", f"{ONES} with --recompute-granularity selective"),
        ("--recompute-layers auto --device cpu", "--recompute-layers auto with --device cpu"),
        (f"--recompute-layers auto {BYTES} 0", f"{BYTES} 0: "),
        (f"{BYTES} 9", f"{BYTES} 9 without --recompute"),
        (f"--offload-activations on {BYTES} 0", f"{BYTES} 0: "),
    ],
)
def test_what_cannot_be_counted_or_measured_is_refused(refused, flags: str, found: str):
    refused(f"{AIAO} {flags}", f"^{found}", alone=False)


@pytest.mark.parametrize("text", ["2,-1", "a,b", "1,,2", "9999999"])
def test_what_is_no_list_of_numbers_is_refused(config, text: str):
    with pytest.raises((ArgumentError, SystemExit)):
        config(f"{AIAO} --recompute-layers={text}")

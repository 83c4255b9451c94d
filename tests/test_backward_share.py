"""What ``--backward-share`` refuses, and for which stages it works."""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable

import pytest

from megatron.fold3d.backward_share import REFUSALS
from megatron.fold3d.config import Fold3DConfig
from megatron.fold3d.refusals import Refusal

NEEDED = "--backward-share 0.5 --clip-grad 0 --overlap-grad-reduce"
UNTIED = "--untie-embeddings-and-output-weights"

Parse = Callable[[str], Namespace]


@pytest.fixture
def parse(parser: ArgumentParser) -> Parse:
    def parse(line: str) -> Namespace:
        model = "--num-layers 8 --schedule aiao --pipeline-model-parallel-size 2"
        return parser.parse_args(f"{model} {line}".split())

    return parse


def problems(args: Namespace) -> list[str]:
    with pytest.raises(ValueError) as raised:  # noqa: PT011  # the caller looks at every line
        Fold3DConfig.from_args(args)
    return str(raised.value).splitlines()


@pytest.mark.parametrize("share", [0, 0.5, 1])
def test_a_share_from_0_to_1_is_taken(parse: Parse, share: float) -> None:
    config = Fold3DConfig.from_args(parse(f"{NEEDED} {UNTIED} --backward-share {share}"))
    assert (config.backward_share, config.deferred_stages) == (share, range(2))


@pytest.mark.parametrize("share", ["-0.1", "1.5", "nan", "inf"])
def test_other_shares_are_refused(parse: Parse, share: str) -> None:
    (problem,) = problems(parse(f"{NEEDED} {UNTIED} --backward-share={share}"))
    assert problem == (
        f"--backward-share {share}: it is a share of DP.sync; give a number from 0 to 1"
    )


def test_nothing_is_deferred_unless_asked_for(parse: Parse) -> None:
    config = Fold3DConfig.from_args(parse("--segments 2"))
    assert (config.backward_share, config.deferred_stages) == (None, range(0))


def test_stages_that_share_the_word_embeddings_are_kept_out(parse: Parse) -> None:
    assert Fold3DConfig.from_args(parse(f"{NEEDED} --segments 2")).deferred_stages == range(1, 3)
    untied = Fold3DConfig.from_args(parse(f"{NEEDED} --segments 2 {UNTIED}"))
    assert untied.deferred_stages == range(4)
    alone = Fold3DConfig.from_args(parse(f"{NEEDED} --pipeline-model-parallel-size 1"))
    assert alone.deferred_stages == range(1)


def test_a_share_that_would_defer_nothing_is_refused(parse: Parse) -> None:
    (problem,) = problems(parse(NEEDED))
    assert problem == (
        "--backward-share 0.5 with 2 stages: the first and the last share the word embeddings "
        "and are synced at the end of the iteration, and there is no other; "
        f"give more --segments, or {UNTIED}"
    )


def test_stock_defers_nothing(parse: Parse) -> None:
    (problem,) = problems(parse(f"{NEEDED} --schedule stock"))
    assert problem.startswith("--backward-share 0.5 with --schedule stock:")


def test_clipping_and_gradients_that_megatron_reduces_at_the_end_are_refused(parse: Parse) -> None:
    assert problems(parse(f"--backward-share 0.5 {UNTIED}")) == [
        "--clip-grad 1.0 with --backward-share 0.5: the norm needs all gradients before the first "
        "step; give --clip-grad 0",
        "--backward-share 0.5 without --overlap-grad-reduce: Megatron then reduces all gradients "
        "at the end of the iteration; add --overlap-grad-reduce",
    ]


@pytest.mark.parametrize("row", REFUSALS, ids=lambda row: row.flag)
def test_a_refusal_is_made_with_a_share_and_not_without(
    parser: ArgumentParser, parse: Parse, row: Refusal
) -> None:
    action = next(a for a in parser._actions if row.flag in a.option_strings)
    assert action.dest == row.attribute
    flag = row.flag
    if action.nargs != 0:
        flag += f" {list(action.choices)[-1] if action.choices else 2}"
    line = f"{UNTIED} --tensor-model-parallel-size 2"

    refused = problems(parse(f"{NEEDED} {line} {flag}"))

    assert [r for r in refused if r.startswith(row.flag) and row.rule in r]
    Fold3DConfig.from_args(parse(f"{line} --overlap-grad-reduce {flag}"))
    flags = {name for a in parser._actions for name in a.option_strings}
    assert set(re.findall(r"--[a-z0-9-]+", f"{row.rule} {row.fix}")) <= flags


@pytest.mark.parametrize("flag", ["--sequence-parallel", "--qk-layernorm"])
def test_what_sums_over_tensor_parallel_ranks_works_on_one(parse: Parse, flag: str) -> None:
    Fold3DConfig.from_args(parse(f"{NEEDED} {UNTIED} {flag}"))

"""Who follows the advice of a refusal gets a run, or another refusal; never the same one again."""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

import pytest

from megatron.fold3d.config.all_flags import megatron_defaults
from megatron.fold3d.config.read_config import read_config
from tests.config.conftest import MODEL
from tests.config.rows import ORDERS, Row, option_of, rows
from tests.config.test_fold3d_config import given_on

RUN = f"{MODEL} --micro-batch-size 1 --global-batch-size 8"
LOCAL = "--transformer-impl local --no-gradient-accumulation-fusion"
GATHERED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
DELAYED = f"--segments 2 --overlap-grad-reduce {LOCAL}"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

# The flags, those that the advice replaces, and what it replaces them by.
ADVICE = (
    ("--schedule aiao", "--decoder-first-pipeline-num-layers 0", "1"),
    ("--schedule aiao", "--decoder-first-pipeline-num-layers 9", "7"),
    ("--schedule aiao --segments 3", "--segments 3", "--segments 2"),
    ("--schedule aiao", "--segments 0", "--segments 1"),
    ("--schedule 1f1b", "--segments 2", "--segments 1"),
    ("--segments 2", "--schedule 1f1b", "--schedule aiao"),
    ("", "--schedule afab:ahead=2", "--schedule afab"),
    (
        f"--schedule aiao:wgrad=behind@1 {DELAYED} --use-distributed-optimizer",
        "",
        "--overlap-param-gather",
    ),
    (DELAYED, "--schedule aiao:wgrad=behind@5", "--schedule aiao:wgrad=behind@1"),
    ("--schedule aiao:wgrad=last@1 --segments 2", "--transformer-impl local", LOCAL),
    (LOCAL, "--schedule zb-h1:wgrad=last@0", "--schedule zb-h1"),
    ("--schedule 1f1b:recompute=early", "", FULL),
    (FULL, "--schedule 1f1b:recompute=early@2", "--schedule 1f1b:recompute=early@0"),
    (FULL, "--schedule stock:recompute=early", "--schedule 1f1b:recompute=early"),
    (f"--schedule 1f1b:recompute=early {FULL}", "--distribute-saved-activations", ""),
    ("--schedule 1f1b", "--recompute-layers 1", "--recompute-layers 1,1"),
    ("--schedule 1f1b", "--recompute-layers 5,1", "--recompute-layers 4,1"),
    ("--schedule 1f1b --recompute-layers 1,1", "--recompute-method uniform", ""),
    ("--schedule 1f1b --activation-memory-bytes 9", "", "--recompute-layers auto"),
    ("--fp8-format hybrid", "--schedule 1f1b:ahead=2", "--schedule 1f1b"),
    ("--schedule 1f1b:ahead=2", "--fp8-format hybrid", "--fp8-recipe tensorwise"),
    ("--overlap-grad-reduce", "--schedule stock:step=next", "--schedule aiao:step=next"),
    ("--schedule aiao:step=next", "", "--overlap-grad-reduce"),
    ("--schedule aiao --shard-segments weights", "", GATHERED),
    ("--schedule aiao:optimizer=replicated", "", GATHERED),
    ("--lazy-inter-segment", "--schedule stock", "--schedule aiao --segments 2"),
    ("--schedule aiao --lazy-inter-segment", "", "--segments 2"),
    ("--schedule aiao --offload-activations on", "", FULL),
    ("", "--schedule auto:step=next", "--schedule auto:step=end"),
    ("", "--schedule auto:ahead=2", "--schedule 1f1b:ahead=2"),
    ("--schedule aiao --trace-iterations 4-5", "", "--trace new"),
)


def problems(parser: ArgumentParser, line: str) -> set[str]:
    """What is refused of a command line, as parsed and once Megatron has validated it."""
    args = parser.parse_args(f"{RUN} {line}".split())
    return set(said(args)) or set(said(validated(args)))


def said(args: Namespace) -> Iterator[str]:
    try:
        read_config(args)
    except ValueError as error:
        yield from str(error).splitlines()


def validated(args: Namespace) -> Namespace:
    """The namespace with what Megatron's validation derives of the pipeline."""
    vars(args).update(
        {k: v for k, v in megatron_defaults(args).items() if getattr(args, k, None) is None}
    )
    segments = args.num_virtual_stages_per_pipeline_rank or 1
    args.virtual_pipeline_model_parallel_size = segments if segments > 1 else None
    if segments == 1:
        args.overlap_p2p_comm = args.align_param_gather = False
    return args


@pytest.mark.parametrize(("flags", "found", "instead"), ADVICE)
def test_who_follows_advice_meets_no_refusal_twice(parser, flags, found, instead):
    if found.startswith("--decoder") and not instead.startswith("--"):
        instead = f"{found.split()[0]} {instead}"
    before = problems(parser, f"{flags} {found}")
    assert before, "no refusal"
    advised = [word for word in instead.split() if word not in f"{flags} {found}".split()]
    advice = " ".join(line.rpartition("; ")[2] + line for line in before)
    if advised and advised[0].startswith("--schedule"):
        assert advised[-1] in advice or advised[-1].rpartition(":")[2] in advice
    elif advised and advised[0].startswith("--"):
        assert advised[0] in advice
    assert not before & problems(parser, f"{flags} {instead}")


def follow(row: Row, parser: ArgumentParser, beside: str, option: str) -> Iterator[str]:
    """Yield the command lines that a row advises, in place of ``beside`` and ``option``."""
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    for words in re.split(r", or |(?<=\w) or (?=--)", row.fix):
        found = re.search(r"(--[a-z0-9-]+)(?: ([a-z0-9]+))?", words)
        if found is None:  # drop it, or the like
            yield beside
            continue
        flag, value = found.groups()
        if words.startswith("drop"):
            yield re.sub(rf"{flag}(?: [^-]\S*)?", "", f"{beside} {option}")
            continue
        action = actions[flag]
        takes = value is not None and action.nargs != 0 and value not in ("alone", "as")
        kept = option if flag in ("--schedule", "--fp8-recipe") else ""
        yield f"{beside} {kept} {f'{flag} {value}' if takes else given_on(action)}"


ROWS = [("--schedule aiao", row) for row in rows(*ORDERS) if "aiao" in ORDERS[row.value]]
ROWS += [("--schedule aiao:step=next --overlap-grad-reduce", row) for row in rows("step=next")]


@pytest.mark.parametrize(("beside", "row"), ROWS, ids=lambda value: getattr(value, "flag", None))
def test_the_advice_of_each_row_ends_its_refusal(parser, beside, row):
    option = given_on(option_of(row, parser))
    before = {p for p in problems(parser, f"{beside} {option}") if row.rule in p}
    assert before
    for advised in follow(row, parser, beside, option):
        assert not {p for p in problems(parser, advised) if row.rule in p}, advised

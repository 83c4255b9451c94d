import re
import sys
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fold3d.config.all_flags import megatron_defaults
from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.config.job_sizes import _SIZES
from megatron.fold3d.config.read_config import read_config
from megatron.fold3d.config.refusals import refusals
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.plan.schedules import SCHEDULES
from megatron.fold3d.training import launch, mistakes
from tests.config.conftest import Parse
from tests.config.rows import ORDERS, OURS, option_of, rows, under
from tests.programs import printed

DOCS = Path(__file__).parents[2] / "docs" / "compatibility.md"
REVIEWED = Path(__file__).parents[1] / "reviewed_options.txt"

MORE = "--micro-batch-size 1 --pipeline-model-parallel-size 1"
TWO_RANKS = "--pipeline-model-parallel-size 2"


def validate(args: Namespace, world_size: int) -> Namespace:
    """What Megatron's validation makes of a namespace, in a launcher that follows ours."""
    from megatron.training.arguments import validate_args

    args.rank, args.world_size = 0, world_size
    validate_args(args, megatron_defaults(args))
    return args


def options(parser: ArgumentParser) -> Iterator[Action]:
    groups = parser._action_groups
    return (a for group in groups if group.title != "FOLD3D" for a in group._group_actions)


@pytest.mark.parametrize(
    "flag",
    [
        "--num-layers-per-virtual-pipeline-stage 0",
        "--tensor-model-parallel-size 0",
        "--pipeline-model-parallel-size -2",
        "--eval-interval 0",
        "--eval-micro-batch-size 0",
        "--log-interval 0",
        "--make-vocab-size-divisible-by 0",
        "--num-layers -8",
        "--seed 0",
    ],
)
def test_a_size_below_one_is_refused_before_anything_divides_by_it(problem, flag: str) -> None:
    said = problem(f"--schedule aiao {flag}")
    assert said == f"{flag}: it is at least one; give another number"


@pytest.mark.newest_options
def test_sizes_checked_for_one_or_more_are_named_after_their_flags(parser: ArgumentParser) -> None:
    known = {flag: action.dest for action in options(parser) for flag in action.option_strings}
    assert {f"--{name.replace('_', '-')}": name for name in _SIZES}.items() <= known.items()


def test_help_needs_no_gpu(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py"])
    with pytest.raises(SystemExit) as ended:
        launch.train(["--help"], "gpt")
    assert ended.value.code == 0
    assert "--shard-segments" in capsys.readouterr().out


def test_a_bare_assertion_of_megatrons_names_its_flags() -> None:
    args = Namespace(hidden_size=33, num_attention_heads=4)
    with pytest.raises(AssertionError) as raised:
        assert args.hidden_size % args.num_attention_heads == 0
    raised.value.args = ()  # pytest has explained it
    assert mistakes._reason(raised.value) == (
        "Megatron demands: --hidden-size % --num-attention-heads == 0"
    )


# Our flags


def test_the_default_is_stock_megatron(parse: Parse) -> None:
    args = parse("")
    assert read_config(args) == Fold3DConfig(
        job=Job(choice=Choice.plain("stock", num_segments=1), num_ranks=1, grad_sync="serial"),
        device="cuda",
        distributed_timeout_minutes=10,
        has_engine_modules=True,
        clips_or_scales=True,  # it clips by default
    )
    assert megatron_defaults(args) == {}


def test_every_flag_reaches_the_configuration(parse: Parse, config, tmp_path: Path) -> None:
    aiao = Choice.plain("aiao", num_segments=2)
    found = config(
        f"--schedule aiao --segments 2 --device cpu {TWO_RANKS} --distributed-timeout-minutes 3"
    )
    assert found == Fold3DConfig(
        job=Job(choice=aiao, num_ranks=2, grad_sync="serial", receives_ahead=3),
        device="cpu",
        distributed_timeout_minutes=3,
        has_engine_modules=True,
        clips_or_scales=True,
        ties_embeddings=True,
    )
    several = f"--segments 2 {TWO_RANKS}"
    flag = "--microbatch-group-size-per-virtual-pipeline-stage 3"
    assert config(f"--schedule interleaved {several} {flag}").choice.group == 3
    by_word = parse(f"--schedule interleaved:group=3 {several}")
    assert read_config(by_word).choice.group == 3
    assert megatron_defaults(by_word)["microbatch_group_size_per_vp_stage"] == 3
    plan = tmp_path / "plan.txt"
    plan.touch()
    planned = config(f"--schedule plan={plan}")
    assert (planned.choice.order, planned.plan_file) == (f"plan={plan}", plan)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_of_the_library_can_be_asked_for(config, schedule: str) -> None:
    local = "--transformer-impl local --no-gradient-accumulation-fusion"  # what zb-h1 can split
    assert config(f"--schedule {schedule} {TWO_RANKS} {local}").choice.order == schedule


def test_forwards_ahead_are_as_given_or_chosen(config, problems) -> None:
    given = config("--schedule 1f1b:ahead=3")
    assert (given.choice.ahead, given.auto) == (3, set())
    auto = config("--schedule interleaved:ahead=auto")
    assert (auto.choice.ahead, auto.auto) == (None, {"ahead"})
    both = problems(f"--schedule aiao:ahead=auto --offload-activations on {TWO_RANKS}")
    assert any("auto with --offload-activations on: each" in line for line in both)


@pytest.mark.processes
def test_the_configuration_loads_neither_torch_nor_megatron_core() -> None:
    code = (
        "import sys, megatron.fold3d.config.all_flags\n"
        "print([m for m in ('torch', 'numpy', 'megatron.core') if m in sys.modules])"
    )
    assert printed(sys.executable, "-c", code) == "[]\n"


# Segments

SEGMENTS = [
    ("--segments 4", 4),
    ("--segments 1", 1),
    ("--num-virtual-stages-per-pipeline-rank 2", 2),
    ("--segments 2 --num-virtual-stages-per-pipeline-rank 2", 2),
    ("--num-layers-per-virtual-pipeline-stage 1", 4),
    ("--segments 2 --num-layers-per-virtual-pipeline-stage 2", 2),
    ("--pipeline-model-parallel-layout Ettt|tt|tt|tL", 2),
    ("--segments 3 --pipeline-model-parallel-layout Et|tt|t*2|(t|)*2tL", 3),
    ("--segments 1 --pipeline-model-parallel-layout Et*5|tttL", 1),
    ("--segments 2 --decoder-first-pipeline-num-layers 6", 2),
    ("--segments 3 --num-layers 9 --decoder-last-pipeline-num-layers 3", 3),
    ("--segments 5 --num-layers 9 --account-for-loss-in-pipeline-split", 5),
]


@pytest.mark.parametrize(("flags", "num_segments"), SEGMENTS)
def test_the_number_of_segments_is_megatrons_before_and_after_validation(
    parse: Parse, flags: str, num_segments: int
) -> None:
    line = f"--schedule aiao --pipeline-model-parallel-size 2 {flags}"
    parsed = read_config(parse(line))
    args = validate(parse(line), world_size=2)
    assert (args.virtual_pipeline_model_parallel_size or 1) == num_segments
    assert parsed.num_segments == num_segments
    assert read_config(args) == replace(parsed, num_replicas=1)


@given(
    st.lists(
        st.tuples(st.text("Etm|", min_size=1, max_size=5), st.integers(1, 4), st.booleans()),
        min_size=1,
        max_size=4,
    )
)
def test_stages_of_a_layout_are_counted_as_megatron_counts_them(parts):
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    from megatron.fold3d.config.job_sizes import written_out

    layout = ",".join(f"({part})*{n}" if grouped else f"{part}*{n}" for part, n, grouped in parts)
    stages = PipelineParallelLayerLayout.get_num_stages_from_str(layout)
    assert written_out(layout).count("|") + 1 == stages


LAYOUT = "--pipeline-model-parallel-layout Ettt|tt|tt|tL"
NO_SUCH_SEGMENTS = [
    (f"{TWO_RANKS} --segments 0", "--segments 0:", "try --segments 1"),
    (
        f"{TWO_RANKS} --segments 4 --num-virtual-stages-per-pipeline-rank 2",
        "--segments 4 with --num-virtual-stages-per-pipeline-rank 2: Megatron makes 2",
        "drop one of the two",
    ),
    (
        f"{TWO_RANKS} --segments 2 --num-layers-per-virtual-pipeline-stage 1",
        "--segments 2 with --num-layers-per-virtual-pipeline-stage 1: Megatron makes 4",
        "drop one of the two",
    ),
    (
        f"{TWO_RANKS} --segments 1 --num-layers-per-virtual-pipeline-stage 3",
        "--num-layers-per-virtual-pipeline-stage 3 with --num-layers 8: they divide",
        "use --segments 1, 2, 4",
    ),
    (
        f"{TWO_RANKS} --segments 4 {LAYOUT}",
        f"--segments 4 with {LAYOUT}: Megatron makes 2",
        "drop one of the two",
    ),
    (
        "--segments 2",
        "2 segments with --pipeline-model-parallel-size 1:",
        "use --segments 1 or more ranks",
    ),
    (
        f"{TWO_RANKS} --segments 3",
        "3 segments with 4 layers per rank:",
        "try --segments 1, 2, 4, or --pipeline-model-parallel-layout",
    ),
    (
        f"{TWO_RANKS} --segments 8",
        "8 segments with 4 layers per rank:",
        "try --segments 1, 2, 4, or --pipeline-model-parallel-layout",
    ),
    (
        f"{TWO_RANKS} --segments 3 --decoder-first-pipeline-num-layers 6",
        "3 segments with 6 and 2 layers per rank:",
        "try --segments 1, 2, or --pipeline-model-parallel-layout",
    ),
    (
        f"{TWO_RANKS} --segments 2 --decoder-first-pipeline-num-layers 2 "
        "--decoder-last-pipeline-num-layers 6",
        "--decoder-first-pipeline-num-layers 2 with --decoder-last-pipeline-num-layers 6: with",
        "drop one of the two",
    ),
    (
        "--segments 2 --pipeline-model-parallel-size 3",
        "8 layers on 3 ranks:",
        "--pipeline-model-parallel-layout says otherwise",
    ),
]


@pytest.mark.parametrize(("flags", "found", "fix"), NO_SUCH_SEGMENTS)
@pytest.mark.parametrize("schedule", ["aiao", "stock"])
def test_segments_that_megatron_cannot_build_are_refused(problem, schedule, flags, found, fix):
    said = problem(f"--schedule {schedule} {flags}")
    assert said.startswith(found)
    assert said.endswith(fix)


@pytest.mark.parametrize("schedule", ["1f1b", "shifted-critical-path", "zb-h1"])
def test_schedules_of_one_segment_refuse_more(problem, schedule: str) -> None:
    local = "--transformer-impl local --no-gradient-accumulation-fusion"
    assert problem(f"--schedule {schedule} --segments 2 {TWO_RANKS} {local}") == (
        f"2 segments with --schedule {schedule}: it runs one segment per rank; "
        "use --segments 1, or --schedule aiao or interleaved"
    )


def test_megatron_checks_what_was_not_asked_of_us(config) -> None:
    found = config(f"--num-virtual-stages-per-pipeline-rank 3 {TWO_RANKS}")
    assert found.num_segments == 3  # 4 layers per rank; stock's own error


def test_segments_that_only_a_checkpoint_knows_are_asked_for(parse: Parse) -> None:
    args = parse(f"--schedule aiao {TWO_RANKS} --num-layers-per-virtual-pipeline-stage 2")
    args.num_layers = None  # as with --use-checkpoint-args
    found = "--num-layers-per-virtual-pipeline-stage 2 without --num-layers: .*; use --segments$"
    with pytest.raises(ValueError, match=found):
        read_config(args)


def test_a_yaml_configuration_hides_our_flags() -> None:
    with pytest.raises(ValueError, match="--yaml-cfg: Megatron then ignores the command line"):
        read_config(Namespace(yaml_cfg="run.yaml"))


# Options of Megatron


def test_every_broken_rule_is_reported_at_once_on_a_line_of_its_own(problems) -> None:
    ours = f"--schedule 1f1b:group=2 --segments 4 {TWO_RANKS}"
    found = problems(f"{ours} --cuda-graph-impl local --use-megatron-fsdp")
    assert [problem.partition(":")[0] for problem in found] == [
        "group=2 with --schedule 1f1b",
        "4 segments with --schedule 1f1b",
        "--cuda-graph-impl local with --schedule 1f1b",
        "--use-megatron-fsdp with --schedule 1f1b",
    ]


def test_delayed_scaling_of_fp8_needs_the_order_of_stock(config, problem) -> None:
    fp8 = "--fp8-format hybrid --transformer-impl transformer_engine"
    assert "stock's order is another" in problem(f"--schedule aiao {fp8}")
    for line in ("--schedule aiao --fp8-recipe tensorwise", "--schedule 1f1b"):
        config(f"{line} {fp8}")


@pytest.mark.parametrize("schedule", ["stock", *sorted(OURS)])
def test_defaults_are_refused_by_no_schedule(parse: Parse, schedule: str) -> None:
    args = parse("--pipeline-model-parallel-size 2")
    assert list(refusals(under(args, schedule))) == []
    assert list(refusals(under(validate(args, world_size=2), schedule))) == []


def given_on(action: Action) -> str:
    """A command line that gives an option another value than its default."""
    flag = action.option_strings[0]
    if flag == "--pipeline-model-parallel-layout":
        return f"{flag} Ett|tt|tt|tt,m|L"
    if flag == "--optimizer":
        return f"{flag} muon --use-distributed-optimizer"
    if action.nargs == 0:
        return flag
    if flag == "--pipeline-model-parallel-comm-backend":
        return f"{flag} ucc"
    value = list(action.choices)[-1] if action.choices else 2
    return " ".join([flag, *[str(value)] * (action.nargs if isinstance(action.nargs, int) else 1)])


@pytest.mark.parametrize("row", rows(*ORDERS), ids=lambda row: row.setting)
def test_a_refusal_is_made_for_its_schedules_and_never_for_stock(parser, parse, row):
    args = parse(f"--pipeline-model-parallel-size 4 {given_on(option_of(row, parser))}")
    for schedule in OURS:
        refused = [line for line in refusals(under(args, schedule)) if row.rule in line]
        assert bool(refused) == (schedule in ORDERS[row.value])
    assert list(refusals(under(args, "stock"))) == []


@pytest.mark.newest_options
def test_every_option_of_megatron_was_looked_at(parser: ArgumentParser) -> None:
    """A newer Megatron's options are decided here before a user meets them.

    For each that is reported: refuse it, or add it to the list of those that were looked at.
    """
    looked_at = set(REVIEWED.read_text().split())
    found = {a.dest for a in options(parser)} - {"help"}
    assert found - looked_at == set(), "new options"
    assert looked_at - found == set(), "options that are gone"


# The documentation


def documented() -> dict[str, list[list[str]]]:
    """The rows of docs/compatibility.md by their option."""
    rows: dict[str, list[list[str]]] = {}
    for line in DOCS.read_text().splitlines():
        if line.startswith("| `--"):
            flags, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            for flag in re.findall(r"`([^`]+)`", flags):
                rows.setdefault(flag, []).append(cells)
    return rows


@pytest.mark.newest_options
def test_what_the_documentation_says_works_is_not_refused(parser, parse):
    by_flag = {flag: a for a in options(parser) for flag in a.option_strings}
    for flag, cells in documented().items():
        if len(cells) == 1 and cells[0][0] == "works":
            assert flag in by_flag, flag
            args = parse(f"--pipeline-model-parallel-size 2 {given_on(by_flag[flag])}")
            assert list(refusals(under(args, "aiao"))) == [], flag


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("--trace-iterations 4-5", "without --trace: there is no folder to write to"),
        ("--trace new --trace-iterations 5-4", "5-4: it is the first and the last iteration"),
        ("--trace new --trace-iterations 0", "0: it is the first and the last iteration"),
        ("--trace new --trace-iterations x", "x: it is the first and the last iteration"),
        ("--trace new --trace-iterations 4-5 --train-iters 4", "the run ends before"),
        (f"--trace {__file__}", "is a file, traces need a folder"),
        (f"--trace {__file__}/new/one", f"{__file__} is a file, traces need a folder"),
    ],
)
def test_what_cannot_be_traced_is_refused(problem, flags: str, found: str) -> None:
    assert found in problem(flags)


GROUP = "--microbatch-group-size-per-virtual-pipeline-stage"
FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
GROUPED = f"interleaved --segments 2 --pipeline-model-parallel-size 4 {GROUP}"
READ = "only 1f1b, aiao, interleaved read it"


@pytest.mark.parametrize(
    ("word", "found"),
    [
        (f"{GROUPED} 3", f"{GROUP} 3 with --schedule interleaved:"),
        (
            f"aiao {FIRST} 9",
            f"{FIRST} 9 of 8 layers: the other 1 ranks hold one layer each at least; give 7 at "
            "most",
        ),
        (f"aiao {LAST} 0", f"{LAST} 0: a rank holds one layer at least; give 1 or more"),
        (f"aiao {FIRST} -1 {LAST} 9", f"{FIRST} -1: a rank holds one layer at least; give 1 or"),
        # Parts of the word that nothing reads
        ("stock:ahead=3", f"ahead=3 with --schedule stock: {READ}"),
        ("afab:ahead=3", f"ahead=3 with --schedule afab: {READ}"),
        ("1f1b:ahead=0", "ahead=0: a rank runs at least one forward ahead"),
        ("aiao:group=4", "group=4 with --schedule aiao: only interleaved has groups"),
        ("interleaved:group=1 --segments 2", "group=1: ranks wait for one another"),
        (f"interleaved:group=4 --segments 2 {GROUP} 2", f"group=4 with {GROUP} 2: both are"),
        ("aiao:share=0.5", "share= without step=next: it is a share of"),
        ("plan=no/such.plan", "--schedule plan=no/such.plan: no such file; write one with `fold3d"),
        (
            "aiao --use-megatron-fsdp",
            "--use-megatron-fsdp with --schedule aiao: it replaces the gradient buckets of "
            "Megatron's DDP, which a schedule reduces; use --use-distributed-optimizer",
        ),
    ],
)
def test_what_a_schedule_cannot_have_is_refused(problem, word: str, found: str) -> None:
    assert problem(f"{TWO_RANKS} --schedule {word}").startswith(found)

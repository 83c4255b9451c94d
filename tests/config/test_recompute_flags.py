"""What ``--recompute-early`` accepts."""

from argparse import ArgumentError, ArgumentParser
from pathlib import Path

import pytest

from fold3d_patches import check_schedule
from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.plan.ir import PlanError

MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --pipeline-model-parallel-size 2"
)
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
AIAO = f"--schedule aiao --segments 2 {FULL}"
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"


def config(parser: ArgumentParser, line: str) -> Fold3DConfig:
    return Fold3DConfig.from_args(parser.parse_args(f"{MODEL} {line}".split()))


def test_stages_are_named_or_all(parser: ArgumentParser):
    assert config(parser, AIAO).recompute_early == ()
    assert config(parser, f"{AIAO} --recompute-early 3,0").recompute_early == (3, 0)
    assert config(parser, f"{AIAO} --recompute-early all").recompute_early == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (FULL, "all with --schedule stock"),
        ("--schedule 1f1b", "all without --recompute-granularity full"),
        ("--schedule 1f1b --recompute-activations", "all without --recompute-granularity full"),
        (f"--schedule aiao --segments auto {FULL}", "all with --segments auto"),
        (f"{AIAO} --recompute-early 1,4", "1,4: there is no stage 4; the plan has stages 0 to 3"),
        (f"{AIAO} --distribute-saved-activations", "all with --distribute-saved-activations"),
        (f"{AIAO} --fp8-format hybrid --fp8-recipe tensorwise", "all with --fp8-format"),
        (f"{AIAO} --offload-activations on", "all with --offload-activations on"),
    ],
)
def test_what_cannot_work_is_refused_with_its_fix(parser: ArgumentParser, line: str, found: str):
    with pytest.raises(ValueError, match=f"^--recompute-early {found}") as raised:
        config(parser, f"--recompute-early all {line}")
    (problem,) = str(raised.value).splitlines()
    assert "; " in problem


EXPERTS = "--num-experts 4 --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type"


@pytest.mark.parametrize(
    ("line", "recomputes"),
    [
        (f"{EXPERTS} global_aux_loss {FULL}", True),
        (f"{EXPERTS} aux_loss global_aux_loss {FULL}", True),
        (f"{EXPERTS} quantile_balancing --moe-layer-recompute", True),
        (f"{EXPERTS} global_aux_loss --recompute-layers 1,1", True),
        (f"{EXPERTS} global_aux_loss --recompute-modules moe", True),
        (f"{EXPERTS} global_aux_loss --recompute-granularity selective", False),
        (f"{EXPERTS} global_aux_loss", False),
        (f"{EXPERTS} aux_loss {FULL}", False),
        (FULL, False),
    ],
)
def test_routers_that_are_recomputed_may_keep_means(
    parser: ArgumentParser, line: str, recomputes: bool
):
    assert config(parser, f"--schedule 1f1b {line}").recomputes_means == recomputes


@pytest.mark.parametrize(
    ("plan", "flags", "reason"),
    [
        (
            "0F0 0F1 0R1 0R0 0B0 0B1\n1F0 1R0 1B0 1F1 1R1 1B1",
            f"{FULL} --recompute-early 0,1",
            "0R1 comes before 0R0, and routers keep a mean",
        ),
        ("0F0 0F1 0B1 0B0\n1F0 1F1 1B1 1B0", FULL, "0B1 comes before 0B0"),
        ("0F0 0F1 0B1 0B0\n1F0 1F1 1B1 1B0", "--moe-layer-recompute", "0B1 comes before 0B0"),
    ],
)
def test_a_plan_that_recomputes_out_of_order_is_refused_where_that_changes_a_mean(
    parser: ArgumentParser, tmp_path: Path, plan: str, flags: str, reason: str
):
    file = tmp_path / "plan.txt"
    file.write_text(plan)
    line = f"--plan-file {file} {flags}"
    with pytest.raises(PlanError, match=reason):
        check_schedule(config(parser, f"{line} {EXPERTS} global_aux_loss"), 2)
    check_schedule(config(parser, f"{line} {EXPERTS} aux_loss"), 2)


def test_what_is_no_list_of_stages_is_refused(parser: ArgumentParser):
    with pytest.raises((ArgumentError, SystemExit)):
        config(parser, f"{AIAO} --recompute-early 1-2")


def test_the_page_has_every_reason():
    page = PAGE.read_text().split("## With `--recompute-early`")[1].split("## ")[0]
    for option in (
        *("--schedule stock", "--segments auto", "--recompute-granularity full"),
        *("--distribute-saved-activations", "--fp8-format", "--offload-activations"),
    ):
        assert option in page

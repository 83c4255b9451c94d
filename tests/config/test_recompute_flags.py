"""What ``recompute=early`` accepts."""

from pathlib import Path

import pytest

from fold3d_patches import check_schedule
from megatron.fold3d.plan.ir import PlanError

FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TWO = f"--segments 2 {FULL}"
AIAO = f"--schedule aiao {TWO}"


@pytest.mark.parametrize(
    ("order", "line", "found"),
    [
        ("1f1b", "", "@0 without --recompute-granularity full"),
        ("1f1b", "--recompute-activations", "@0 without --recompute-granularity full"),
        ("aiao", f"--segments auto {FULL}", "@0 with --segments auto"),
    ],
)
def test_what_cannot_work_is_refused_with_its_fix(refused, order: str, line: str, found: str):
    refused(f"--schedule {order}:recompute=early {line}", f"^recompute=early{found}")


EXPERTS = "--num-experts 4 --moe-aux-loss-coeff 0.01 --moe-router-load-balancing-type"


@pytest.mark.parametrize(
    ("line", "recomputes"),
    [
        (f"{EXPERTS} global_aux_loss {FULL}", True),
        (f"{EXPERTS} aux_loss global_aux_loss {FULL}", True),
        pytest.param(
            f"{EXPERTS} quantile_balancing --moe-layer-recompute",
            True,
            marks=pytest.mark.newest_options,  # a value that came with some
        ),
        (f"{EXPERTS} global_aux_loss --recompute-layers 1,1", True),
        (f"{EXPERTS} global_aux_loss --recompute-modules moe", True),
        (f"{EXPERTS} global_aux_loss --recompute-granularity selective", False),
        (f"{EXPERTS} global_aux_loss", False),
        (f"{EXPERTS} aux_loss {FULL}", False),
        (FULL, False),
    ],
)
def test_routers_that_are_recomputed_may_keep_means(config, line: str, recomputes: bool):
    assert config(f"--schedule 1f1b {line}").recomputes_means == recomputes


@pytest.mark.parametrize(
    ("plan", "flags", "reason"),
    [
        (
            "0F0 0F1 0R1 0R0 0B0 0B1\n1F0 1R0 1B0 1F1 1R1 1B1",
            f" {FULL}",
            "0R1 comes before 0R0, and routers keep a mean",
        ),
        ("0F0 0F1 0B1 0B0\n1F0 1F1 1B1 1B0", f" {FULL}", "0B1 comes before 0B0"),
        ("0F0 0F1 0B1 0B0\n1F0 1F1 1B1 1B0", " --moe-layer-recompute", "0B1 comes before 0B0"),
    ],
)
def test_a_plan_that_recomputes_out_of_order_is_refused_where_that_changes_a_mean(
    config, tmp_path: Path, plan: str, flags: str, reason: str
):
    file = tmp_path / "plan.txt"
    file.write_text(plan)
    line = f"--schedule plan={file}{flags}"
    with pytest.raises(PlanError, match=reason):
        check_schedule(config(f"{line} {EXPERTS} global_aux_loss"), 2)
    check_schedule(config(f"{line} {EXPERTS} aux_loss"), 2)


def test_a_segment_that_there_is_not_is_refused(config):
    with pytest.raises(ValueError, match="early@1,2: there is no segment 2, a rank holds 2; give"):
        config(f"{AIAO} --schedule aiao:recompute=early@1,2")


def test_what_a_plan_file_holds_is_on_without_a_part_of_the_word(config, tmp_path: Path):
    file = tmp_path / "plan.txt"
    file.write_text("0F0 0R0 0B0 0W0 2F0 2R0 2B0\n1F0 1B0 1W0 3F0 3B0")
    whole = f"--schedule plan={file} --segments 2 {FULL}"
    line = f"{whole} --transformer-impl local --no-gradient-accumulation-fusion"
    found = config(line)
    assert (found.apart, found.early_stages) == ((0,), (0, 1, 2, 3))
    assert not found.choice.slices
    for part in ("wgrad=last@0", "recompute=early", "slices=on"):
        with pytest.raises(ValueError, match="the actions of the plan say it; drop it"):
            config(line.replace(str(file), f"{file}:{part}"))
    with pytest.raises(ValueError, match="early@0,1 without --recompute-granularity full: only"):
        config(line.replace(FULL, ""))

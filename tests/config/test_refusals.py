"""The table of refusals: each setting is known, and the page is what the table prints."""

from argparse import Namespace

import pytest

from megatron.fold3d.config.refusals import TABLE, WITHOUT, value_of
from megatron.fold3d.config.run_flags import _CLASHES
from megatron.fold3d.config.settings import _NAMED, asked, attribute_of
from megatron.fold3d.plan.schedule_word import VALUES
from scripts import print_refusals


def settings() -> list[str]:
    """All settings of both tables, and their values."""
    tables = {**TABLE, **_CLASHES}
    rows = [row for reasons in tables.values() for row in reasons]
    many = [one for row in rows for one in row.removeprefix(WITHOUT).split(", ")]
    return sorted({one for some in many for one in some.split(" and ")} | {*map(value_of, tables)})


@pytest.mark.parametrize("setting", settings())
def test_each_setting_is_a_name_or_a_flag_of_the_installed_megatron(parser, setting):
    flag = setting.split()[0]
    if flag.startswith("--"):
        known = {flag: a.dest for a in parser._actions for flag in a.option_strings}
        assert known[flag] == attribute_of(flag)
    elif setting not in _NAMED:
        key, is_part, value = setting.partition("=")
        assert is_part
        assert value in ("", *VALUES[key])


def test_names_are_those_of_the_table_and_of_what_reads_settings() -> None:
    assert not _NAMED.keys() - {*settings()}


@pytest.mark.parametrize(
    ("setting", "values", "found"),
    [
        ("--num-experts", {"num_experts": 4}, "--num-experts 4"),
        ("--num-experts", {"num_experts": None}, ""),
        (
            "--recompute-modules",
            {"recompute_modules": ["mlp", "moe"]},
            "--recompute-modules mlp moe",
        ),
        ("--recompute-layers", {"recompute_layers": (1, 0)}, "--recompute-layers 1,0"),
        ("--offload-activations", {"offload_activations": "off"}, ""),
        ("--segments auto", {"segments": "auto"}, "--segments auto"),
        ("--segments auto", {"segments": 2}, ""),
        ("--optimizer other than adam or sgd", {"optimizer": "muon"}, "--optimizer muon"),
        ("--optimizer other than adam or sgd", {"optimizer": "sgd"}, ""),
        ("--timing-log-level above 1", {"timing_log_level": 2}, "--timing-log-level 2"),
        ("--timing-log-level above 1", {"timing_log_level": 1}, ""),
        (
            "--fp8-format and --bf16",
            {"fp8": "hybrid", "bf16": True},
            "--fp8-format hybrid and --bf16",
        ),
        ("--fp8-format and --bf16", {"fp8": "hybrid", "bf16": False}, ""),
        ("--qk-clip", {}, ""),
    ],
)
def test_a_setting_is_read_as_it_is_typed(setting, values, found):
    assert asked(Namespace(**values), setting) == found


@pytest.mark.parametrize("form", TABLE)
def test_each_reason_has_a_rule_and_a_fix(form: str) -> None:
    assert [why for why in TABLE[form].values() if "; " not in why] == []


def test_the_page_is_what_the_table_prints() -> None:
    page = print_refusals.PAGE.read_text()
    assert print_refusals.printed(page) == page, "run scripts/print_refusals.py"
    named = [v for p in print_refusals.PLACE.finditer(page) for v in p["values"].split(", ")]
    assert len({*named}) == len(named)
    assert {*named} == {*map(value_of, TABLE)}

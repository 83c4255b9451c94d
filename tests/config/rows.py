"""The rows of the table of refusals, one by one."""

from argparse import Action, ArgumentParser, Namespace
from dataclasses import dataclass

from megatron.fold3d.config.refusals import TABLE, value_of
from megatron.fold3d.config.settings import attribute_of
from megatron.fold3d.plan.schedules import SCHEDULES

PLAN_FILE = "plan=plan.txt"
OURS = frozenset({*SCHEDULES, "auto", PLAN_FILE})
STOCKS_ORDER = frozenset({"1f1b", "interleaved"})
GROUPED = frozenset({"auto", "interleaved"})
# The values that are orders of computation, and the schedules that have them.
ORDERS = {
    "a schedule of ours": OURS,
    "another order than stock's": OURS - STOCKS_ORDER,
    "a schedule without groups": OURS - GROUPED,
    "a schedule with groups": GROUPED,
    "a plan file": frozenset({PLAN_FILE}),
}


@dataclass(frozen=True)
class Row:
    """A value and a setting that it refuses."""

    value: str
    setting: str
    why: str

    @property
    def flag(self) -> str:
        return self.setting.split()[0]

    @property
    def rule(self) -> str:
        return self.why.rpartition("; ")[0]

    @property
    def fix(self) -> str:
        return self.why.rpartition("; ")[2]


def rows(*values: str) -> list[Row]:
    """Return the rows of values for a single flag each."""
    return [
        Row(value_of(form), setting, why)
        for form, reasons in TABLE.items()
        if value_of(form) in values
        for settings, why in reasons.items()
        for setting in settings.split(", ")
        if setting.startswith("--") and " and " not in setting
    ]


def option_of(row: Row, parser: ArgumentParser) -> Action:
    """Return the parser's option of a row, by its flag and by its attribute."""
    (found,) = (a for a in parser._actions if row.flag in a.option_strings)
    assert found.dest == attribute_of(row.flag)
    return found


def under(args: Namespace, schedule: str) -> Namespace:
    """Return a namespace with another schedule."""
    return Namespace(**vars(args) | {"schedule": schedule})

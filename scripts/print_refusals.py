"""Print what is refused into docs/compatibility.md, from the table of `config.refusals`.

    .venv/bin/python scripts/print_refusals.py

The page has a comment where a list belongs, which names the values of the list; `with reasons`
makes it a table. A test compares the page with what this prints.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron.fold3d.config.refusals import STOCKS, TABLE, WITHOUT, value_of

PAGE = Path(__file__).parents[1] / "docs" / "compatibility.md"
PLACE = re.compile(
    r"(?P<begin><!-- refused: (?P<values>[^>]+?)(?P<full> with reasons)? -->\n)"
    r".*?(?P<end><!-- -->\n)",
    re.S,
)
_IN_A_SENTENCE = 12


def printed(page: str) -> str:
    """Return a page whose lists are those of the table."""
    return PLACE.sub(
        lambda place: "".join(
            (
                place["begin"],
                *(f"{line}\n" for line in _lines(place["values"].split(", "), place["full"])),
                place["end"],
            )
        ),
        page,
    )


def shown(setting: str) -> str:
    """Return a setting as the page has it: what users type is code."""
    if re.fullmatch(r"--\S+ \S+", setting):
        return f"`{setting}`"
    return re.sub(
        r"--[\w-]+( (?=\d|delayed|auto)\w+)?|\b[a-z-]+=\w*", lambda code: f"`{code[0]}`", setting
    )


def _lines(values: list[str], full: str | None) -> Iterator[str]:
    groups = {form: rows for form, rows in TABLE.items() if value_of(form) in values}
    if full:
        yield "| Option | With our schedules | Why | Instead |"
        yield "|---|---|---|---|"
        for form, rows in groups.items():
            value = value_of(form)
            where = "" if value == values[0] else f" with {value}"
            for settings, why in rows.items():
                rule, _, fix = why.rpartition("; ")
                yield f"| {' '.join(_listed(settings))} | refused{where} | {rule} | {fix} |"
        return
    for form, rows in groups.items():
        every = [setting for row in rows for setting in _listed(row)]
        for first in range(0, len(every), _IN_A_SENTENCE):
            some = every[first : first + _IN_A_SENTENCE]
            yield f"- {shown(value_of(form))}: {', '.join(some)}"


def _listed(settings: str) -> list[str]:
    if settings.startswith(WITHOUT):
        needed = settings.removeprefix(WITHOUT).split(" and ")
        return [f"without {shown(setting)}" for setting in needed]
    return [setting if setting == STOCKS else shown(setting) for setting in settings.split(", ")]


def main() -> int:
    """Write the page; returns the exit code."""
    PAGE.write_text(printed(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

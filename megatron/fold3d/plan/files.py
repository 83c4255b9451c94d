"""Plan files: read what `fold3d plan` wrote, or a user wrote by hand.

There are three forms, told apart by their content: text, a CSV table, and the JSON of
`fold3d plan --json`. Of the JSON only ``programs`` is read; the rest follows from it.
"""

import json
from pathlib import Path

from megatron.fold3d.plan.ir import Plan, PlanError


def read_plan(path: Path) -> Plan:
    """Return the plan in a file.

    Raises:
        PlanError: the file holds no plan; the message begins with its path.
        OSError: it cannot be read.
    """
    try:
        return parse_plan(path.read_bytes())
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def parse_plan(content: bytes) -> Plan:
    """Return the plan that a file's content spells.

    Raises:
        PlanError: it spells none.
    """
    try:
        text = content.decode("utf-8-sig")  # spreadsheets put a byte order mark first
    except UnicodeDecodeError:
        raise PlanError("not text; a plan file is what `fold3d plan` writes") from None
    if text.lstrip().startswith("{"):
        return _from_json(text)
    is_table = any("," in line for line in text.splitlines() if not line.startswith("#"))
    return Plan.from_csv(text) if is_table else Plan.from_text(text)


def _from_json(text: str) -> Plan:
    try:
        programs = json.loads(text)["programs"]
        return Plan.from_text("\n".join(" ".join(program) for program in programs))
    except PlanError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PlanError(
            f"JSON without readable programs ({type(error).__name__}: {error}); "
            "`fold3d plan --json` writes them as a list of lists of actions"
        ) from None

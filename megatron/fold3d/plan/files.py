"""Plan files, written by `fold3d plan` or by hand.

There are three forms, distinguished by their content: text, a CSV table, also in the words of
``torch.distributed.pipelining``, and the JSON of `fold3d plan --json`. From JSON only ``programs``
is read, since all other fields follow from the programs.
"""

import csv
import io
import json
from pathlib import Path

from megatron.fold3d.plan.ir import Plan, PlanError, lines_of

MOST_BYTES = 1 << 30
"""The size limit of files that are read into memory, far above any plan, trace or cost table."""


def read_file(path: Path) -> bytes:
    """Return the content of a file that a user named.

    Raises:
        ValueError: the file is too long; the message begins with its path.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:  # read up to the limit: the size of a pipe is unknown
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"{path}: longer than {MOST_BYTES} bytes; is it another file?")
    return content


def read_plan(path: Path) -> Plan:
    """Return the plan in a file.

    Raises:
        PlanError: the file holds no plan; the message begins with its path.
        ValueError: the file is too long.
        OSError: the file cannot be read.
    """
    try:
        return parse_plan(read_file(path))
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def parse_plan(content: bytes) -> Plan:
    """Return the plan in a file's content.

    Raises:
        PlanError: the content is not a plan.
    """
    try:
        text = content.decode("utf-8-sig")  # spreadsheets put a byte order mark first
    except UnicodeDecodeError:
        raise PlanError("not text; a plan file is what `fold3d plan` writes") from None
    if text.lstrip().startswith("{"):
        return _from_json(text)
    if not any("," in line for line in text.splitlines() if not line.startswith("#")):
        return Plan.from_text(text)
    if "REDUCE_GRAD" in text or "I" in text:
        from megatron.fold3d.plan.torch_tables import is_torch_table, translated

        if is_torch_table(text):
            text = translated(text)
    return from_csv(text)


def to_csv(plan: Plan) -> str:
    """Return a table: one row per rank, one cell per action."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(plan.to_rows())
    return out.getvalue()


def from_csv(text: str) -> Plan:
    """Read the text of `to_csv`, or a table with empty cells where a rank is idle.

    Raises:
        PlanError: see `Plan.from_text`; or the text is not a CSV table.
    """
    try:
        return Plan.from_rows(csv.reader(lines_of(text)))
    except csv.Error as error:
        raise PlanError(f"not a table of actions: {error}") from None


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

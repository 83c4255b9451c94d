"""Tables of ``torch.distributed.pipelining``, as its schedules dump them, in our words.

| torch | here |
|---|---|
| ``1I0`` input gradients, then ``1W0`` | ``1B0``, then ``1W0`` |
| ``1B1``, all gradients, in a stage that splits others | ``1B1 1W1`` |
| ``(1F1;3B0)OVERLAP_F_B`` | ``1F1 3B0`` |
| ``1REDUCE_GRAD``, whose end ``step`` waits for | ``1ALL_REDUCE``, and ``1STEP`` last |
| ``1UNSHARD`` and ``1RESHARD``, FSDP's | nothing: parameters are whole |
"""

import csv
import io
import re
from collections.abc import Iterator, Sequence

_ONLY_TORCHS = re.compile(r"\d(I\d|UNSHARD|RESHARD)|OVERLAP_F_B")
_SPLIT = re.compile(r"(\d+)(I|B)(\d+)")
_STARTED = re.compile(r"(\d+)REDUCE_GRAD")


def is_torchs(table: str) -> bool:
    """Return True if a CSV table has torch's words for actions.

    Version 0.1 had ``REDUCE_GRAD`` as well, always with ``WAIT_GRAD``.
    """
    starts_alone = "REDUCE_GRAD" in table and "WAIT_GRAD" not in table
    return starts_alone or _ONLY_TORCHS.search(table) is not None


def in_our_words(table: str) -> str:
    """Translate torch's CSV table of actions into ours.

    Raises:
        csv.Error: the text is not a CSV table.
    """
    rows = [[*_cells(row)] for row in csv.reader(table.splitlines())]
    cut = (found for row in rows for word in row if (found := _SPLIT.fullmatch(word)))
    split = {found[1] for found in cut if found[2] == "I"}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([*_row(row, split)] for row in rows)
    return out.getvalue()


def _cells(row: Sequence[str]) -> Iterator[str]:
    for cell in row:
        word = cell.strip()
        if word.endswith(")OVERLAP_F_B"):
            yield from word.removesuffix(")OVERLAP_F_B").removeprefix("(").split(";")
        elif word and not word.endswith(("UNSHARD", "RESHARD")):
            yield word


def _row(row: Sequence[str], split: set[str]) -> Iterator[str]:
    for word in row:
        found = _SPLIT.fullmatch(word)
        if started := _STARTED.fullmatch(word):
            yield f"{started[1]}ALL_REDUCE"
        elif found is None or found[1] not in split:
            yield word
        else:
            stage, op, microbatch = found.groups()
            yield f"{stage}B{microbatch}"
            if op == "B":
                yield f"{stage}W{microbatch}"
    all_started = [found[1] for word in row if (found := _STARTED.fullmatch(word))]
    yield from (f"{stage}STEP" for stage in all_started)

"""Translation of the CSV tables that ``torch.distributed.pipelining`` dumps into our words.

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

from megatron.fold3d.plan.ir import Plan

_ONLY_TORCHS = re.compile(r"\d(I\d|UNSHARD|RESHARD|REDUCE_GRAD)|OVERLAP_F_B")
_SPLIT = re.compile(r"(\d+)(I|B)(\d+)")
_STARTED = re.compile(r"(\d+)REDUCE_GRAD")


def is_torch_table(table: str) -> bool:
    """Return True if a CSV table has torch's words for actions."""
    return _ONLY_TORCHS.search(table) is not None


def translated(table: str) -> str:
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


def placement_error(plan: Plan, stage: int, rank: int) -> str:
    """Return why a stage cannot be on a rank, for example in torch's V placement.

    In a V the second segment passes through the ranks in reverse order.
    """
    last = plan.num_stages - 1
    is_v = plan.num_segments == 2 and all(
        stage in (rank, last - rank)
        for rank, program in enumerate(plan.programs)
        for stage, _, _ in program
    )
    if not is_v:
        return f"stage {stage} belongs to rank {stage % plan.num_ranks}"
    return (
        f"stage {stage} is on rank {rank}, as where stages are placed in a V (ZBV, DualPipeV): "
        f"that placement is not supported, stage s is on rank s % {plan.num_ranks}; use a schedule "
        "that places its stages in a loop, as torch's Interleaved1F1B and InterleavedZeroBubble do"
    )

"""A timeline as text: one row per rank, one column per unit of time.

rank 0 | 0F0 0F1 ·   0B0──── 0B1────
rank 1 | ·   1F0 1B0──── ...
"""

from megatron.fold3d.observe.timeline import Lane, Timeline

_IDLE, _GOES_ON = "·", "─"


def to_text(timeline: Timeline, *, width: int = 0, height: int = 0) -> str:
    """Return the computations of a timeline as a grid, whose unit is the shortest of them.

    Args:
        timeline: simulated or measured; times are rounded to the unit.
        width: characters of a line; longer rows go on in a further block. By default no limit.
        height: lines of the width; a grid that has more is empty. By default no limit.
    """
    lanes = [timeline.lane(rank, Lane.COMPUTE) for rank in range(timeline.num_ranks)]
    durations = [span.duration_s for spans in lanes for span in spans if span.duration_s > 0]
    unit_s = min(durations, default=1.0)
    if height and (not durations or timeline.makespan_s / unit_s > width * height):
        return ""
    columns = max((round(spans[-1].end_s / unit_s) for spans in lanes if spans), default=0)
    cell = 1 + max((len(str(span.action)) for spans in lanes for span in spans), default=1)
    names = [f"rank {rank}" for rank in range(timeline.num_ranks)]
    margin = max(map(len, names), default=0)

    rows = []
    for spans in lanes:
        row = [_IDLE.ljust(cell)] * columns
        for span in spans:
            first = round(span.start_s / unit_s)
            last = max(first + 1, round(span.end_s / unit_s))
            word = str(span.action).ljust((last - first) * cell - 1, _GOES_ON) + " "
            row[first:last] = [word[i * cell : (i + 1) * cell] for i in range(last - first)]
        rows.append(row)

    per_block = max(1, (width - margin - 3) // cell) if width else max(1, columns)
    blocks = [
        "\n".join(
            f"{name:<{margin}} | {''.join(row[first : first + per_block])}".rstrip()
            for name, row in zip(names, rows, strict=True)
        )
        for first in range(0, max(1, columns), per_block)
    ]
    text = "\n\n".join(blocks) + "\n"
    return "" if 0 < height < text.count("\n") else text

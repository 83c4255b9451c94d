"""Hold the planner to what others measured, from the words of their tables.

Which half is for what was decided before any row was read. A table's rows count from 1 in its own
order. Odd rows are *open*: causes of errors are looked for in them. Even rows are *held*: they are
only for the final number. vTrain's rows count within a model, the others' within a table. Of a
cluster whose rows are at several rates, the fastest is open and all others are held.
"""


def is_held(row: int) -> bool:
    """Return whether a row of a table, counted from 1, is kept out of the search for causes."""
    return row % 2 == 0

"""The patches of ``--trace``: upstream functions that also record when they begin and end."""

"""Functions from measured seconds and bytes to settings, for runtime and planner; no torch."""

"""Passes from plan to plan, one per file; each adds or moves one kind of action."""

"""Passes from plan to plan, one per file; each adds one kind of action and moves no others."""

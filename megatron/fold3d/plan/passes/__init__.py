"""Passes from plan to plan, a file each: each adds one kind of action and moves nothing else."""

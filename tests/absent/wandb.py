"""Stands before ``wandb`` on the path of a job that does without: a fourth of its start."""

raise ModuleNotFoundError("No module named 'wandb'", name="wandb")

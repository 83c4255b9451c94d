"""Stands before ``transformers`` on the path of a job that does without: a fourth of its start."""

raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

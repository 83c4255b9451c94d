"""Measurements of the hardware that a run uses."""

"""Measurements of a run's own hardware."""

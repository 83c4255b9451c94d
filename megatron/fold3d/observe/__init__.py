"""Traces and timelines of measured runs, and their analysis. No torch."""

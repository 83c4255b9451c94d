"""WHAT RAN: traces and timelines of measured runs, and what they say. No torch."""

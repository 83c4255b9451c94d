"""Timelines as text, SVG, a page for the browser and a Perfetto trace."""

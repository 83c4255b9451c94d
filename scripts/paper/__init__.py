"""The paper's evaluation by name: ``python -m scripts.paper table2``."""

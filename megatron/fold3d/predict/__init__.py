"""WHAT WOULD RUN: simulator, cost model, search, and the paper's own numbers. No torch."""

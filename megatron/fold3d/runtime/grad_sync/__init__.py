"""DP.sync: gradient reductions and parameter all-gathers, within an iteration and across two."""

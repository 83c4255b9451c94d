"""DP.sync: gradients on the way between replicas, within an iteration and across two."""

"""Pipeline transfers preempt DP.sync: one thread starts all communication of a rank."""

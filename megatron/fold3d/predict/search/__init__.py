"""The planner: which schedule, how many segments, which (dp, pp, tp)."""

"""Settings from measurements: functions that runtime and planner share. No torch."""

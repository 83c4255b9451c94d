"""FROM MEASUREMENTS TO SETTINGS: functions that runtime and planner share. No torch."""

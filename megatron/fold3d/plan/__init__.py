"""Plans as data: schedules, lowering passes and the verifier. Standard library only."""

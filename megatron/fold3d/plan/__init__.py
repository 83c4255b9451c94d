"""WHAT happens: schedules, lowering passes and the verifier. Standard library only."""

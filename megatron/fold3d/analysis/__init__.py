"""HOW LONG, HOW MUCH: simulated and measured runs, formulas, memory. No torch."""

"""The paper's formulas and the rows of its tables."""

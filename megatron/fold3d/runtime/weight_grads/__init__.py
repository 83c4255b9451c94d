"""Weight gradients that are computed separately from the backward."""

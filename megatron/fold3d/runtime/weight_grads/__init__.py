"""Weight gradients that are computed apart from their backward."""

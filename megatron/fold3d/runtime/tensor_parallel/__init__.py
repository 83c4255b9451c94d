"""Two micro-batches at a time: one computes while the other's tensor-parallel collective runs."""

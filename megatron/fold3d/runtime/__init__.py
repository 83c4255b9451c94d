"""Runs plans over Megatron's model chunks and process groups."""

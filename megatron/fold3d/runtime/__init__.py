"""DOING it: plans run over Megatron's model chunks and process groups."""

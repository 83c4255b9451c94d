"""Patches that put a schedule of ours in the place of Megatron's."""

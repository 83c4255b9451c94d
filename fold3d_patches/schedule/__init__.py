"""Patches that replace Megatron's schedule with ours."""

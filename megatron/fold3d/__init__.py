"""Pipeline plans for Megatron-core: what happens, how long it takes, and doing it.

Importing this package loads nothing: `plan` needs the standard library alone, `runtime` torch.
"""

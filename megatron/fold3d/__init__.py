"""Pipeline plans for Megatron-core: making, simulating and running them.

Importing this package loads nothing else: `plan` needs only the standard library, `runtime` torch.
"""


def __getattr__(name: str) -> object:
    if name not in (
        "add_arguments",
        "install",
        "parse_args",
    ):  # docs/quickstart.md has them
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron.fold3d.training import own_script

    return getattr(own_script, name)

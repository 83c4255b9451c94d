"""Pipeline plans for Megatron-core: making, simulating and running them.

Importing this package loads nothing else: `plan` needs only the standard library, `runtime` torch.
"""

_MODULES = {  # docs/quickstart.md has their functions
    "add_arguments": "own_script",
    "bridge": "bridge_script",
    "install": "own_script",
    "parse_args": "own_script",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.training.{_MODULES[name]}"), name)

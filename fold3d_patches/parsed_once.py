"""Patch what ``megatron.training.initialize.initialize_megatron`` does with flags.

Why: before 0.18 ``pretrain`` parses and validates the flags, and sets Megatron's global variables.
    Our flags decide before that which patches are installed, so all of this is done already.
Change: ``pretrain`` takes the flags as they are.
Remove when: Megatron-core 0.17 is no longer supported.
"""

from typing import Any

from fold3d_patches.registry import replace

_INITIALIZE = "megatron.training.initialize"


def _parsed(*_args: Any, **_kwargs: Any) -> Any:
    from megatron.training import get_args

    return get_args()


PATCHES = (
    replace(f"{_INITIALIZE}:parse_args", _parsed),
    *(
        replace(f"{_INITIALIZE}:{name}", lambda *_args, **_kwargs: None)
        for name in ("validate_args", "set_global_variables")
    ),
)

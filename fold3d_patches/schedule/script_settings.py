"""Patch ``train`` and ``evaluate_and_print_results`` of ``megatron.training.training``.

Why: what a script hands to ``pretrain``, or sets in the model's configuration, has no flag.
Change: what a plan cannot run ends the job before the first iteration, in one message.
Remove when: ``pretrain`` calls a hook before it trains.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from fold3d_patches.registry import around


def _checked(upstream: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron.core.utils import get_model_config

    from megatron.fold3d.runtime.executor import script_problems

    given = inspect.signature(upstream).bind(*args, **kwargs).arguments
    alone = given["process_non_loss_data_func"] if not given.get("non_loss_data_func") else None
    if problems := [*script_problems(get_model_config(given["model"][0]), alone)]:
        from megatron.fold3d.training.mistakes import refuse

        sys.exit(refuse(ValueError("\n".join(problems))))
    return upstream(*args, **kwargs)


PATCHES = tuple(
    around(
        f"megatron.training.training:{name}",
        parameters="model process_non_loss_data_func non_loss_data_func",
    )(_checked)
    for name in (
        "train",
        "evaluate_and_print_results",
    )  # with --skip-train only the second is called
)

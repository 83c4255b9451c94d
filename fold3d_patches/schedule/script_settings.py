"""Patch ``train`` and ``evaluate_and_print_results`` of ``megatron.training.training``.

Why: what a script hands to ``pretrain``, or sets in the model's configuration, has no flag.
Change: what a plan cannot run ends the job before the first iteration, in one message.
Remove when: ``pretrain`` calls a hook before it trains.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

from fold3d_patches.registry import Patch, around


def patches() -> Iterator[Patch]:
    """Yield the patches of both functions: with ``--skip-train`` Megatron calls only the second."""
    for name in ("train", "evaluate_and_print_results"):
        yield around(
            f"megatron.training.training:{name}",
            _checked,
            parameters="model process_non_loss_data_func non_loss_data_func",
        )


def _checked(upstream: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from megatron.core.utils import get_model_config

    from megatron.fold3d.runtime.executor import script_problems

    given = inspect.signature(upstream).bind(*args, **kwargs).arguments
    alone = given["process_non_loss_data_func"] if not given.get("non_loss_data_func") else None
    if problems := [*script_problems(get_model_config(given["model"][0]), alone)]:
        from megatron.fold3d.training.mistakes import refuse

        sys.exit(refuse(ValueError("\n".join(problems))))
    return upstream(*args, **kwargs)

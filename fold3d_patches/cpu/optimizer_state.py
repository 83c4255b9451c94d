"""Patch how ``DistributedOptimizer`` saves and loads the state of torch's Adam.

Why: without Transformer Engine and NVIDIA apex the optimizer is torch's, whose state differs from
    theirs in three ways that Megatron overlooks. There is none before the first step, where
    Megatron asserts that there is. Each parameter has a step counter, which Megatron saves as if
    it were a shard of the parameter (it comes back as garbage) and loads as one counter shared by
    all (each update then counts as many). And fp32 parameters, which require gradients, are
    written in place.
Change: a parameter without a state gets the one that torch would give it; counters stay out of
    the shards (Megatron has the number of steps elsewhere) and apart; loading records no
    gradients.
Remove when: a run with ``--use-distributed-optimizer`` resumes bit for bit without these patches.
"""

from collections.abc import Callable
from typing import Any

import torch

from fold3d_patches.registry import around

_OPTIMIZER = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


@around(f"{_OPTIMIZER}.state_dict", parameters="self /")
def _complete(upstream: Callable[[Any], Any], self: Any) -> Any:
    if isinstance(self.optimizer, torch.optim.Adam):  # AdamW is one
        for parameter in (p for group in self.optimizer.param_groups for p in group["params"]):
            if not self.optimizer.state[parameter]:
                self.optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
    return upstream(self)


@around(f"{_OPTIMIZER}.load_state_dict", parameters="self state_dict /")
def _count_apart(upstream: Callable[[Any, Any], None], self: Any, state_dict: Any) -> None:
    upstream(self, state_dict)
    for state in self.optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].clone()


@around(f"{_OPTIMIZER}._get_main_param_and_optimizer_states", parameters="self model_param /")
def _shards_only(upstream: Callable[[Any, Any], Any], self: Any, model_param: Any) -> Any:
    tensors = upstream(self, model_param)
    return {name: tensor for name, tensor in tensors.items() if name != "step"}


@around(
    f"{_OPTIMIZER}._set_main_param_and_optimizer_states",
    parameters="self model_param tensors /",
)
@torch.no_grad()
def _keep_counter(
    upstream: Callable[[Any, Any, Any], None], self: Any, model_param: Any, tensors: Any
) -> None:
    upstream(self, model_param, {**tensors, "step": None})  # what is no tensor is not copied


PATCHES = (_complete, _count_apart, _shards_only, _keep_counter)

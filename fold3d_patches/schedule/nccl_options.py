"""Patch ``megatron.core.parallel_state.get_nccl_options``.

Why: Megatron's file of NCCL options (``--nccl-communicator-config-path``) knows no traffic class.
Change: the groups of PP.sync and DP.sync get theirs, and keep what the file says; ours take their
    options from these groups. No GPU has run this.
Remove when: Megatron reads ``traffic_class`` from that file.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fold3d_patches.registry import Patch, around

_PP = ("pp",)
_DP = ("dp", "dp_cp", "intra_dp_cp", "ep_dp", "intra_ep_dp", "inter_ep_dp")


def patch(pp_traffic_class: int | None, dp_traffic_class: int | None) -> Patch:
    """Return the patch that sets the traffic classes of Megatron's process groups, if given."""
    classes = dict.fromkeys(_PP, pp_traffic_class) | dict.fromkeys(_DP, dp_traffic_class)

    @around("megatron.core.parallel_state:get_nccl_options", parameters="pg_name nccl_comm_cfgs /")
    def mark(upstream: Callable[..., Any], pg_name: str, nccl_comm_cfgs: dict[str, Any]) -> Any:
        options: Any = upstream(pg_name, nccl_comm_cfgs)
        if (traffic_class := classes.get(pg_name)) is None:
            return options
        options = options or dist.ProcessGroupNCCL.Options()
        options.config.traffic_class = traffic_class
        return options

    return mark


def check_traffic_classes() -> None:
    """Refuse a torch that cannot set a traffic class.

    Raises:
        ValueError: what it lacks, and what to do.
    """
    known = dist.is_nccl_available() and hasattr(
        dist.ProcessGroupNCCL.Options().config, "traffic_class"
    )
    if not known:
        raise ValueError(
            f"--traffic-class: NCCL's options in torch {torch.__version__} "
            "have no traffic_class; use a torch that has it, such as 2.13, or drop the flag"
        )

"""A configuration that tests change where they care."""

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Features

CONFIG = Fold3DConfig(
    choice=Choice.plain("stock", num_segments=1),
    features=Features(grad_sync="serial"),
    num_ranks=1,
    device="cpu",
    distributed_timeout_minutes=1,
)

"""A configuration that tests change where they care."""

from megatron.fold3d.config.fold3d_config import Fold3DConfig

CONFIG = Fold3DConfig(
    schedule="stock",
    plan_file=None,
    num_ranks=1,
    num_segments=1,
    device="cpu",
    microbatch_group_size=None,
    distributed_timeout_minutes=1,
)

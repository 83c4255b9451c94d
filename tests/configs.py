"""A configuration that tests change where they care."""

from dataclasses import fields, replace
from typing import Any

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job

CONFIG = Fold3DConfig(
    job=Job(choice=Choice.plain("stock", num_segments=1), num_ranks=1, grad_sync="serial"),
    device="cpu",
    distributed_timeout_minutes=1,
)


def configured(base: Fold3DConfig = CONFIG, **changed: Any) -> Fold3DConfig:
    """A configuration with other fields, of its job too."""
    of_job = {field.name for field in fields(Job)} & changed.keys()
    job = replace(base.job, **{name: changed.pop(name) for name in of_job})
    return replace(base, job=job, **changed)

"""``--schedule plan=FILE``: the order of an iteration from a file."""

from pathlib import Path

from megatron.fold3d.config.fold3d_config import Fold3DConfig
from megatron.fold3d.plan.files import parse_plan, read_file
from megatron.fold3d.plan.ir import Op, Plan, PlanError, Program, carried
from megatron.fold3d.plan.ops import FREE_OPS, SUM_OPS
from megatron.fold3d.plan.passes.early_grad_sync import stages_in_parts


def read_order(config: Fold3DConfig, path: Path, num_microbatches: int) -> Plan:
    """Return the plan in a file, after checking that it fits this run.

    Raises:
        PlanError: the plan is for other sizes, or has actions of a feature that is off.
    """
    plan = parse_plan(read_file(path))
    found = plan.num_ranks, plan.num_segments, plan.num_microbatches
    needed = config.num_ranks, config.num_segments, num_microbatches
    if found != needed:
        raise PlanError(
            f"found {_sizes(*found)}, this run has {_sizes(*needed)}; "
            "a plan file fits one size: change the flags, or name a schedule"
        )
    if config.job.shards == "off" and plan.has(*FREE_OPS):
        raise PlanError("found FREE_PARAM in the plan; give --shard-segments weights")
    if config.job.shards != "gradients" and plan.has(Op.FREE_GRAD):
        raise PlanError("found FREE_GRAD in the plan; give --shard-segments gradients")
    for program in plan.programs:
        _check_sums(config, program)
    if plan.has(Op.OFFLOAD) and config.offload_activations == "off":
        raise PlanError("found OFFLOAD in the plan; give --offload-activations on")
    return plan


def _check_sums(config: Fold3DConfig, program: Program) -> None:
    """Check that the DP.sync of a rank is what this run can do."""
    early, late, choice = stages_in_parts(program), carried(program), config.choice
    for stage in early:
        if choice.carries or not config.job.reduces_early:
            raise PlanError(
                f"found parts of stage {stage}'s DP.sync between its weight gradients; this run "
                "can only start it behind them (docs/architecture.md, DP.sync between weight "
                "gradients): move them there"
            )
    for action in program:
        stage, op, _ = action
        in_shards = config.job.steps_shards
        if op in SUM_OPS and (op is Op.REDUCE_SCATTER) != in_shards:
            ours = Op.REDUCE_SCATTER if in_shards else Op.ALL_REDUCE
            raise PlanError(
                f"found {action}; {'with' if in_shards else 'without'} --use-distributed-optimizer "
                f"it is {action._replace(op=ours)}: write that, or change the flag"
            )
        if stage in late and op is Op.STEP and not choice.carries:
            raise PlanError(
                f"found {action} before {stage}F0, which ends DP.sync of the iteration before: "
                "add step=next, or move the action to the end"
            )


def _sizes(num_ranks: int, num_segments: int, num_microbatches: int) -> str:
    return f"{num_ranks} ranks, {num_segments} segments, {num_microbatches} micro-batches"

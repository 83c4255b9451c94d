"""The verifier's check of recomputation that updates state which later micro-batches read.

Megatron 0.19.2 updates this state in the forwards and recomputations of a training iteration. In a
safe order, a run trains what stock trains:

| State | Updated in | Safe orders |
|---|---|---|
| routers' means (``global_aux_loss``, ``quantile_balancing``) | forwards with gradients: \
recomputations, or forwards of layers that keep all | a stage's micro-batches in order, see below |
| tokens per expert, for ``--moe-router-enable-expert-bias`` | forwards with gradients | all: \
counts are read when the iteration ends |
| greatest attention logit, for ``--qk-clip`` | forwards and recomputations | all: a maximum |
| auxiliary losses in the log | forwards and recomputations | all: training does not read them |
| scale of the auxiliary losses | forwards | all: one number for an iteration |
| scales of fp8's delayed scaling | forwards and backwards, of all stages of a rank at once | \
stock's own: `config.refusals` |
| weights cast to fp8 | a stage's first forward | all: the stage's step is older |
| random numbers of dropout, jitter and forced balance of experts | forwards; recomputations \
restore the generator's state | a rank's forwards in stock's order; two of stock's own schedules \
differ too |
| data, reported losses, the largest loss seen | forwards of the first and the last stage | \
micro-batches in order: `verify` demands it of all forwards |
"""

from collections import Counter

from megatron.fold3d.plan.ir import Action, Op, Plan, error_at
from megatron.fold3d.plan.passes.recompute import recomputed


def check_recompute_order(plan: Plan) -> None:
    """Check that each stage recomputes its micro-batches in their order, early or in backwards.

    Raises:
        PlanError: a stage does not; the message marks its first such action in the plan.
    """
    for rank, program in enumerate(plan.programs):
        early, due = recomputed(program), Counter[int]()
        for index, (stage, op, microbatch) in enumerate(program):
            if op is not Op.RECOMPUTE and (op is not Op.BACKWARD or (stage, microbatch) in early):
                continue
            if microbatch != due[stage]:
                word = Op.RECOMPUTE if (stage, due[stage]) in early else Op.BACKWARD
                text = (
                    f"{program[index]} comes before {Action(stage, word, due[stage])}, and routers "
                    "keep a mean over the micro-batches that are recomputed (global_aux_loss, "
                    "quantile_balancing): recompute them in order, or give "
                    "--moe-router-load-balancing-type aux_loss"
                )
                raise error_at(plan, {rank: index}, text)
            due[stage] += 1

"""The pass that cuts DP.sync into slices, each of which overlaps a computation.

If all streams of a GPU share one hardware queue, collectives that are launched in a row block
computation until all but the last have ended. So one collective, a slice, is launched before each
computation:

    before  rank 0  0F0 0F1 2F0 2F1 2B0 2B1 2ALL_REDUCE 0B0 0B1 0ALL_REDUCE 2STEP 0STEP
    after   rank 0  0F0 0F1 2F0 2F1 2B0 2B1 2ALL_REDUCE:500 0B0 2ALL_REDUCE 0B1 0ALL_REDUCE
                    2STEP 0STEP

A share of carried DP.sync, here one half, overlaps the backwards. The rest overlaps the next
iteration's forwards, in the order in which these need the parameters:

    before  rank 0  0STEP 0F0 0F1 2STEP 2F0 2F1 2B0 2B1 2REDUCE_KEPT 2ALL_REDUCE 0B0 ...
    after   rank 0  0STEP 2ALL_REDUCE:750 0F0 2ALL_REDUCE 0F1 2STEP 2F0 2F1 2B0 2B1
                    2REDUCE_KEPT 2ALL_REDUCE:250 0B0 2ALL_REDUCE:500 0B1 0REDUCE_KEPT 0ALL_REDUCE
                    2FINALIZE 0FINALIZE
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from megatron.fold3d.plan.ir import WHOLE, Action, Op, Program, carried, per_rank
from megatron.fold3d.plan.ops import COMPUTE_OPS, SUM_OPS
from megatron.fold3d.plan.passes.carried_grad_sync import backwards_end
from megatron.fold3d.plan.passes.weight_grads import split_stages

MOST_SLICES = 100
"""The most slices of a stage in an iteration, since a slice should take longer than its launch."""


@per_rank
def slice_grad_sync(program: Program, shares: Sequence[float]) -> Iterator[Action]:
    """Cut DP.sync into slices, one before each computation that may hide it.

    The size of a slice is proportional to the time of the computation that follows it.

    Args:
        shares: for each stage, the part of its DP.sync that is launched before the next stage's
            DP.sync; used only for carried stages.
    """
    reduces = [i for i, action in enumerate(program) if action.op in SUM_OPS]
    late = carried(program)
    weights = _weights(program)
    before: defaultdict[int, list[Action]] = defaultdict(list)  # slices by index of the next action
    for index, end in zip(reduces, [*reduces[1:], backwards_end(program)], strict=True):
        whole = program[index]
        stage = whole.stage
        behind = [i for i in range(index, end) if i in weights]
        if stage in late:
            share = round(shares[stage] * WHOLE) if behind else 0
            ahead = [i for i in _window_of_rest(program, stage) if i in weights]
            ahead = ahead or [end if behind else index]  # no gap is left: at once
        else:
            share, behind, ahead = WHOLE, behind or [index], []
        if share:
            _put(before, whole, behind, weights, 0, share)
        if share < WHOLE:
            _put(before, whole, ahead, weights, share, WHOLE)
    for index, action in enumerate(program):
        yield from before[index]
        if action.op not in SUM_OPS:
            yield action
    yield from before[len(program)]


def has_slices(program: Program) -> bool:
    """Tell whether DP.sync has cuts besides those at weight gradients and of carried shares."""
    apart = {*carried(program), *(stage for stage, op, _ in program if op is Op.WEIGHT_PART)}
    return any(op in SUM_OPS and end is not None and s not in apart for s, op, end in program)


def _window_of_rest(program: Program, stage: int) -> range:
    """Return the indices from the previous stage's STEP to a carried stage's STEP."""
    steps = [i for i, action in enumerate(program) if action.op is Op.STEP]
    own = next(i for i in steps if program[i].stage == stage)
    return range(max((i for i in steps if i < own), default=own), own)


def _weights(program: Program) -> dict[int, int]:
    """Return, by index, the time of each computation in multiples of a forward's."""
    split = split_stages(program)
    return {
        index: 1 + (op is Op.BACKWARD and stage not in split)
        for index, (stage, op, _) in enumerate(program)
        if op in COMPUTE_OPS
    }


def _put(
    before: Mapping[int, list[Action]],
    whole: Action,
    gaps: Sequence[int],
    weights: Mapping[int, int],
    begin: int,
    end: int,
) -> None:
    """Put slices from ``begin`` to ``end``, in thousandths, before the actions at ``gaps``."""
    gaps = gaps[:: 1 + (len(gaps) - 1) // MOST_SLICES]
    ends = [*accumulate(weights.get(gap, 1) for gap in gaps)]
    last = begin
    for gap, weight in zip(gaps, ends, strict=True):
        until = begin + (end - begin) * weight // ends[-1]
        if until > last:
            before[gap].append(whole.until(until))
        last = until

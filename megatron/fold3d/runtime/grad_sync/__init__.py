"""DP.sync: gradient reductions and parameter all-gathers, within an iteration and across two.

`dp_sync.DPSync` is the feature. Who owns a gradient whose sum the plan cuts or carries, from its
backward to its step:

    DDP ──────────> StageGradients ─────────> Sums ──────────────> PartialStep ──> DDP
        complete:                  take(end):      wait: summed                zero
        checked, scaled            in pieces

`DueSteps` asks for that step, in the next iteration, if the sum is carried. If it is not, Megatron
steps it. Whole sums of an iteration are DDP's from first to last.
"""

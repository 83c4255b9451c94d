"""DP.sync: gradient reductions and parameter all-gathers, within an iteration and across two.

`dp_sync.DPSync` is the feature of each run. Around it, `DueSteps` takes what is carried into the
next iteration, `ReplicatedSegments` has segments whose optimizer is not sharded, and `SecondLane`
has process groups for GPUs with one hardware queue. Who owns a gradient whose sum the plan cuts or
carries, from its backward to its step:

    DDP ──────────> StageGradients ─────────────────────────────> PartialStep ──> DDP
        complete:       start_until: in pieces     wait: summed              zero
        checked, scaled

If the sum is carried, `DueSteps` asks for that step in the next iteration. If it is not, Megatron
steps it. Whole sums of an iteration are DDP's from first to last.
"""

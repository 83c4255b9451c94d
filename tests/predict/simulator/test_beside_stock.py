"""Our interleaved schedule beside stock's in the same layout, whose sends are waited for."""

from dataclasses import replace

import pytest

from megatron.fold3d.predict.simulator.costs import Costs
from megatron.fold3d.predict.simulator.link import Link, sends_stock_waits_for
from megatron.fold3d.predict.simulator.simulate import simulate
from tests.plans import built

OURS = Link()
SIZES = [  # ranks, micro-batches, group
    (2, 4, 2),
    *((4, 4, 4), (4, 8, 4), (4, 8, 8), (4, 16, 4), (4, 16, 8), (4, 16, 16)),
]


@pytest.mark.parametrize("segments", [2, 4])
@pytest.mark.parametrize(("ranks", "microbatches", "group"), SIZES)
@pytest.mark.parametrize("recomputed", [False, True])
def test_with_the_same_groups_ours_is_never_slower(
    segments: int, ranks: int, microbatches: int, group: int, recomputed: bool
):
    plan = built("interleaved", ranks, segments, microbatches, group_size=group)
    stocks = replace(OURS, sends_waited_for=sends_stock_waits_for(segments))
    for transfer_s in (0.15, 0.6, 2.4):
        each = 1 / segments
        costs = Costs.uniform(
            ranks * segments,
            forward_s=each,
            backward_s=(3 if recomputed else 2) * each,
            recompute_s=each * recomputed,
            p2p_s=transfer_s,
        )
        ours_s, stock_s = (simulate(plan, costs, by).period_s for by in (OURS, stocks))
        assert stock_s / ours_s >= 0.99, f"transfer of {transfer_s}"

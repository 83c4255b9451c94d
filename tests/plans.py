"""Plans that several tests simulate or compare with."""

from typing import Any

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job, lower
from megatron.fold3d.plan.ir import Plan
from megatron.fold3d.plan.memory import peak_resident
from megatron.fold3d.plan.schedules import build
from megatron.fold3d.plan.verify import verify

# Qi et al., Figure 3, top, which counts from 1: four ranks and eight micro-batches
ZB_H1 = [
    "0F0 0F1 0F2 0F3 0B0 0W0 0F4 0B1 0W1 0F5 0B2 0W2 0F6 0B3 0W3 0F7 0B4 0W4 "
    "0B5 0W5 0B6 0W6 0B7 0W7",
    "1F0 1F1 1F2 1B0 1F3 1B1 1W0 1F4 1B2 1W1 1F5 1B3 1W2 1F6 1B4 1W3 1F7 1B5 1W4 "
    "1B6 1W5 1B7 1W6 1W7",
    "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2W0 2F4 2B3 2W1 2F5 2B4 2W2 2F6 2B5 2W3 2F7 2B6 2W4 "
    "2B7 2W5 2W6 2W7",
    "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3W0 3F4 3B4 3W1 3F5 3B5 3W2 3F6 3B6 3W3 3F7 3B7 3W4 "
    "3W5 3W6 3W7",
]


def built(schedule: str, ranks: int, segments: int, microbatches: int, **options: Any) -> Plan:
    """The compute order of a schedule."""
    sizes = {"num_ranks": ranks, "num_segments": segments, "num_microbatches": microbatches}
    return build(schedule, **sizes, **options)


def planned(
    order: Plan, parts: str | Choice = "", *, transfers: bool = True, **fields: Any
) -> Plan:
    """The plan of an order with what a word's parts choose, and the fields of `Job`."""
    choice = parts
    if isinstance(choice, str):
        choice = Choice.parse(f"plan=it:{choice}" if choice else "plan=it", order.num_segments)
    return lower(Job.of(order, choice, **fields), transfers=transfers)


def verified(plan: Plan) -> Plan:
    """A plan, once it is known to run."""
    verify(plan)
    return plan


def rows(plan: Plan) -> list[str]:
    """The programs of a plan as text, once it is known to run."""
    return verified(plan).to_text().splitlines()


def whole_at_once(plan: Plan, **bytes_each: float) -> tuple[int, ...]:
    """Per rank, the most stages that are whole at once, of parameters or of gradients."""

    def peak(rank: int) -> float:
        own = range(rank, plan.num_stages, plan.num_ranks)
        sizes = (bytes_each.get(name, 0.0) for name in ("parameters", "gradients"))
        return peak_resident(
            plan.programs[rank], *(dict.fromkeys(own, size) for size in sizes), replicas=10**6
        )

    return tuple(int(peak(rank)) for rank in range(plan.num_ranks))


def deferred_grad_sync(order: Plan) -> Plan:
    """The order with DP.sync that reaches into the next iteration (paper Sec. III-B step 3)."""
    return planned(order, "step=next", transfers=False)

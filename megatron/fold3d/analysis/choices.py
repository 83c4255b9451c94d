"""What a search has found, and how to say it."""

from dataclasses import dataclass

from megatron.fold3d.analysis.candidates import Candidate
from megatron.fold3d.analysis.exposure import Exposure

WORTHWHILE = 0.01  # a smaller gain than this is within the error of the costs


@dataclass(frozen=True, slots=True)
class Choice:
    """A configuration with what it is predicted to do."""

    candidate: Candidate
    iteration_s: float
    device_bytes: float
    exposed: Exposure

    @property
    def limit(self) -> str:
        """What takes the most time beside computation."""
        row = self.exposed
        causes = {
            "bubble": row.bubble_s,
            "DP.sync": row.grad_sync_s,
            "PP.sync": row.p2p_s,
            "host copies": row.copy_s,
        }
        name = max(causes, key=causes.__getitem__)
        share = row.share(causes[name])
        return f"{name} {share:.0%}" if share >= 0.02 else "computation"


@dataclass(frozen=True, slots=True)
class Search:
    """The best configurations, fastest first, and how many were looked at."""

    best: tuple[Choice, ...]
    best_stock: Choice | None
    considered: int
    too_large: int
    simulated: int


def to_text(found: Search) -> str:
    """Return the choices as a table, the best stock configuration last, and what it means."""
    head = f"{'schedule':<12} {'dp':>4} {'pp':>3} {'tp':>3} {'seg':>3} {'mbs':>3}  {'recompute':<9}"
    rows = [head + f" {'iteration':>10} {'memory':>9}  limited by"]
    stock = found.best_stock
    for choice in (*found.best, *([stock] if stock and stock not in found.best else [])):
        c, setup = choice.candidate, choice.candidate.setup
        name = c.schedule + "+offload" * c.offload
        rows.append(
            f"{name:<12} {setup.data_parallel:>4} {c.num_ranks:>3} {setup.tensor_parallel:>3} "
            f"{c.num_segments:>3} {setup.microbatch_size:>3}  {setup.recompute:<9} "
            f"{choice.iteration_s:>9.3f}s {choice.device_bytes / 2**30:>5.1f} GiB  {choice.limit}"
        )
    rows.append(f"{found.considered} considered, {found.too_large} too large for a GPU's memory")
    best = found.best[0]
    if stock is None:
        rows.append("No stock configuration fits.")
    elif (gain := stock.iteration_s / best.iteration_s - 1) < WORTHWHILE:
        best = stock
        rows.append("AIAO gains nothing here, use these stock flags:")
    else:
        rows.append(f"AIAO is {gain:.1%} faster than the best stock configuration:")
    return "\n".join([*rows, best.candidate.flags()]) + "\n"

"""Fig. 14 and the times to a loss: what is measured of a small GPT, and what follows for GPT-3."""

from megatron.fold3d.observe.exposure import Exposure
from scripts.paper.curves import TARGET, picture, stored
from scripts.paper.points import A100_39B, Iteration, Point, Times, against_megatron, gain
from scripts.paper.results import Grid, Number, Result, claims
from scripts.paper.tables import predicted


def times_to_a_loss() -> Grid:
    """Return when each system of the kept run of a small GPT reached one loss."""
    seconds = {name: curve.seconds_to(TARGET) for name, curve in stored().items()}
    base = seconds["megatron"]
    numbers = [Number(name, "s", found) for name, found in seconds.items()]
    if base:
        numbers += [
            Number(name, "% of megatron's", 100 * found / base)
            for name, found in seconds.items()
            if found is not None
        ]
    return Grid(title=f"Measured time to a loss of {TARGET}, small GPT", numbers=tuple(numbers))


def _of_table(point: Point, name: str) -> Iteration:
    """Return the iteration of a row of Table II, which has this point."""
    system = {"fold3d": "Fold3D", "megatron": "Megatron-SP"}[name]
    _, columns = predicted("A100x128", "GPT-3 39B", system)
    return Iteration(parts=Exposure(forward_s=columns["iteration_ms"] / 1e3))


def fig14(times: Times = _of_table) -> Result:
    """Fig. 14: the time to a loss, which is that of as many iterations."""
    ratio = gain(times, A100_39B)
    less = None if ratio is None else 1 - 1 / ratio
    claim = ("time that FOLD3D saves, %", 23.7, None if less is None else less * 100)
    bars = tuple(
        against_megatron("GPT-3 39B", name, times, A100_39B, name, lambda part: 100 * part, said)
        for name, said in (("fold3d", 76.3), ("megatron", 100.0))
    )
    title = "% of Megatron's time to the same loss"
    grid = Grid(title=title, numbers=bars, drawn=("fold3d", "megatron"))
    return Result(
        name="fig14",
        title="Fig. 14, time to a loss, GPT-3 39B on 128 A100",
        grids=(grid, claims(claim), times_to_a_loss()),
        curves=picture(stored()),
        notes=(
            "the curves follow from no simulation, and need training of GPT-3 39B: ours are of a "
            "small GPT (curves.py); that losses are equal is tested bit for bit, "
            "tests/end_to_end/test_equal_to_stock.py",
        ),
    )

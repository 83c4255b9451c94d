"""A sample of the fuzzer, with a seed of its own; `make stress` runs it for as long as asked."""

from types import SimpleNamespace

import pytest
import torch

from tests.end_to_end.training import _optimizer_state
from tests.stress.flag_sets import FlagSet, draw, random_plan, refusal, refusal_of
from tests.stress.fuzz import EQUAL, FINDINGS, compare

SEED = "sample"
DRAWS = 2


@pytest.mark.gloo
@pytest.mark.parametrize("number", range(DRAWS))
def test_drawn_runs_of_ours_are_stocks(number: int) -> None:
    results = [*compare(draw(f"{SEED}/{number}", variants=2)[0])]
    found = [result for result in results if result.outcome in FINDINGS]
    assert not found, found
    assert any(result.outcome == EQUAL for result in results), results


def test_moments_of_a_parameter_that_was_never_updated_are_as_good_as_none() -> None:
    """Where every step overflows: Megatron's distributed optimizer saves zeros for no state."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.Adam(parameters)
    one = SimpleNamespace(optimizer=optimizer, get_loss_scale=lambda: torch.ones(()))
    whole = dict(_optimizer_state(SimpleNamespace(chained_optimizers=[one])))
    zeros = {"step": torch.zeros(()), "exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
    optimizer.state[parameters[0]] |= zeros
    assert dict(_optimizer_state(SimpleNamespace(chained_optimizers=[one]))) == whole
    optimizer.state[parameters[0]]["step"] += 1
    assert dict(_optimizer_state(SimpleNamespace(chained_optimizers=[one]))) != whole
    one.optimizer = None  # all parameters of its kind are frozen
    assert [*dict(_optimizer_state(SimpleNamespace(chained_optimizers=[one])))] == ["0 loss scale"]


@pytest.mark.newest_options
def test_a_seed_names_a_draw() -> None:
    assert draw("one", variants=2) == draw("one", variants=2)
    assert draw("one", variants=2) != draw("two", variants=2)


@pytest.mark.slow
def test_what_is_drawn_is_legal() -> None:
    for number in range(20):
        for flags in draw(f"{number}", variants=2)[0]:
            assert not refusal(flags.stock(), flags.num_ranks)
            assert not refusal_of(flags)


def test_a_random_plan_has_every_computation_once() -> None:
    flags = FlagSet(pp=2, segments=2, m=3, settings={"weight gradients": ":wgrad=last@1"})
    ranks = [line.split() for line in random_plan(flags).splitlines()]
    for rank, actions in enumerate(ranks):
        stages = (rank, rank + 2)
        ops = {stages[0]: "FB", stages[1]: "FBW"}
        expected = {f"{s}{op}{j}" for s in stages for op in ops[s] for j in range(3)}
        assert sorted(actions) == sorted(expected)

import pytest

from megatron.fold3d.plan.choice import Choice
from megatron.fold3d.plan.compile import Job
from megatron.fold3d.predict.search.candidate_timeline import timeline_of
from megatron.fold3d.predict.search.segments import by_simulation
from megatron.fold3d.predict.simulator.costs import Costs
from tests.predict.paper.published import QUEUE_PER_STREAM, SETUP_39B
from tests.predict.setups import candidate, estimated


def costs(overhead_s, grad_sync_s=8.0, ranks=2):
    """8 s of forwards and backwards each over 8 micro-batches, split into segments."""

    def of(segments):
        return Costs.uniform(
            ranks * segments,
            forward_s=1 / 3 / segments + overhead_s,
            backward_s=2 / 3 / segments + overhead_s,
            grad_sync_s=grad_sync_s / segments,
        )

    return of


def aiao(num_ranks: int, num_microbatches: int, step: str = "next") -> Job:
    choice = Choice.plain("aiao", 1, share=1.0).changed(step=step)
    return Job(choice=choice, num_ranks=num_ranks, num_microbatches=num_microbatches)


def test_simulation_raises_segments_while_they_are_free_and_not_against_their_overhead():
    assert by_simulation([1, 2, 4], costs(0.0), aiao(2, 8)).num_segments == 4
    assert by_simulation([1, 2, 4], costs(1.0), aiao(2, 8)).num_segments == 1


def test_of_equals_the_fewest_segments_are_taken():
    alone = by_simulation([1, 2, 4], costs(0.0, 0.0, 1), aiao(1, 8))
    assert alone.num_segments == 1
    assert "1: 8 s, 2: 8 s, 4: 8 s" in alone.reason


def test_messages_that_fill_a_link_go_one_after_the_other_as_in_training():
    slow = Costs.uniform(4, p2p_s=2.0)
    found = by_simulation([2], lambda _: slow, aiao(2, 8, "end"))
    assert "2: 70 s" in found.reason  # 76.8 s if each had a share of the link


@pytest.mark.slow
@pytest.mark.parametrize("word", ["aiao", "aiao:step=next"])
def test_39b_gets_a_number_of_segments_within_2_percent_of_the_best(word):
    # The paper's cluster, split and software overhead. Of all that divide 12 layers per rank, each
    # is simulated as it runs; the choice is made from costs alone, before anything runs.
    known = {
        n: estimated("gpt3-39b", QUEUE_PER_STREAM, SETUP_39B, 4, n) for n in (1, 2, 3, 4, 6, 12)
    }
    step = "end" if word == "aiao" else "next"
    chosen = by_simulation(known, lambda segments: known[segments].costs, aiao(4, 16, step))

    periods_s = {
        n: timeline_of(candidate(word, n, 4, 16, SETUP_39B), known[n]).period_s for n in known
    }
    assert periods_s[chosen.num_segments] <= 1.02 * min(periods_s.values())
    assert max(periods_s.values()) > 1.3 * min(periods_s.values())  # there is something to choose

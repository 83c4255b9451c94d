from megatron.fold3d.observe.training_log import LoggedIteration, Spread, parse

LOG = """\
 > building train, validation, and test datasets for GPT ...
 [2026-11-21 02:14:45] iteration        1/       6 | consumed samples:           16 | elapsed time \
per iteration (ms): 2612.5 | learning rate: 1.000000E-04 | global batch size:    16 | lm loss: \
4.864507E+00 | loss scale: 1.0 | grad norm: 2.217 | number of skipped iterations:   0 |
 [2026-11-21 02:14:47] iteration        2/       6 | consumed samples:           32 | elapsed time \
per iteration (ms): 1152.1 | learning rate: 1.000000E-04 | global batch size:    16 | loss scale: \
1.0 | number of skipped iterations:   1 |
"""


def test_iterations_are_read_with_their_loss_and_norm():
    assert parse(LOG) == [
        LoggedIteration(number=1, last=6, elapsed_ms=2612.5, loss=4.864507, batch_size=16),
        LoggedIteration(number=2, last=6, elapsed_ms=1152.1, batch_size=16),
    ]


def test_the_loss_of_a_script_of_ones_own_is_read():
    named = LOG.replace("| lm loss: 4.864507E+00", "| focal loss: 4.5E+00 | z loss: 1.0E+00")
    assert [row.loss for row in parse(named)] == [4.5, None]
    beside = LOG.replace("| lm loss:", "| mtp_1 loss: 9.0E+00 | lm loss:")
    assert [row.loss for row in parse(beside)] == [4.864507, None]


def test_a_line_that_is_still_being_written_is_left_out():
    for end in range(len(LOG)):
        assert parse(LOG[:end]) == parse(LOG)[: LOG[:end].count(" |\n")]


def test_a_spread_is_the_median_and_the_quartiles():
    assert Spread.of([40.0, 10.0, 30.0, 20.0, 50.0]) == Spread(30.0, 20.0, 40.0)
    assert str(Spread.of([7.0])) == "7 (7-7)"

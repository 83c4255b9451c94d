import pytest

from megatron.fold3d.observe.digits import digits, milliseconds, seconds


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (0, "0"),
        (0.25, "0.250"),
        (3.1, "3.10"),
        (99.96, "100"),
        (-12.345, "-12.3"),
        (1234, "1,230"),
        (1e6 / 3, "333,000"),
    ],
)
def test_a_prediction_has_three_digits(number: float, said: str):
    assert digits(number) == said


def test_times_have_a_unit_that_reads_well():
    assert [*map(seconds, (0, 0.0123456, 0.1, 33.3))] == ["0 s", "12.3 ms", "0.100 s", "33.3 s"]


def test_measured_milliseconds_have_four_digits_or_all_before_the_point():
    assert [*map(milliseconds, (0.0123456, 1.5, 33.25))] == ["12.35", "1500", "33250"]
    assert [milliseconds(s, "+") for s in (0.048, -0.048)] == ["+48", "-48"]

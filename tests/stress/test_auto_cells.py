"""The cells of `tests.stress.auto_cells` still reach the search that a command makes."""

import pytest

from tests.stress.auto_cells import every, search


@pytest.mark.search
def test_a_cell_is_searched_and_all_of_its_choices_are_known() -> None:
    found = search("0.35", "", segments=2)
    assert found.found[found.space.first] == found.first
    assert {*found.space.starts()} <= {*every(found)}

from xml.etree import ElementTree

import pytest

from megatron.fold3d.commands.pictures import plot_losses

TEXT = "{http://www.w3.org/2000/svg}text"

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.processes  # matplotlib lists the system's fonts once


def test_lines_that_lie_on_each_other_are_said_to_be_equal():
    equal, other = [(1.0, 2.0), (2.0, 1.0)], [(1.0, 2.0), (3.0, 1.0)]
    svg = plot_losses(
        "loss", {"iteration": {"a": equal, "b": equal}, "s": {"a": equal, "b": other}}
    )
    words = [text.text for text in ElementTree.fromstring(svg.decode()).iter(TEXT)]
    assert "iteration; all lines are equal" in words
    assert "s" in words

from pathlib import Path
from xml.etree import ElementTree

import pytest

from megatron.fold3d.commands.pictures import CHAR, SIZE, WIDTH
from megatron.fold3d.observe.report.palette import DARK, LIGHT_TEXT
from scripts.paper.draw import draw
from scripts.paper.results import Grid, Number, Result

TEXT = "{http://www.w3.org/2000/svg}text"

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.processes  # matplotlib lists the system's fonts once


def bars(names: list[str], folder: Path) -> str:
    numbers = tuple(Number("group", name, 1.0 + n, 9.0) for n, name in enumerate(names))
    grid = Grid(title="% faster", numbers=numbers, drawn=tuple(names), mark="at most, any order")
    (svg,) = draw(Result(name="gain", title="gain", grids=(grid,)), folder)
    return svg.read_text()


@pytest.mark.parametrize("words", [1, 3, 6])
def test_every_entry_of_a_legend_is_inside_the_picture(words: int, tmp_path: Path):
    names = [f"{'clips ' * words}{n}" for n in range(4)]
    svg = ElementTree.fromstring(bars(names, tmp_path))
    left = {text.text: float(x) for text in svg.iter(TEXT) if (x := text.get("x"))}
    for name in (*names, "at most, any order"):
        assert left[name] + CHAR * SIZE * len(name) <= WIDTH


def test_words_in_dark_boxes_stay_white_on_a_dark_page(tmp_path: Path):
    rules = bars(["stock"], tmp_path).partition("@media")[2].partition("</style>")[0]
    assert DARK["ink"] in rules
    assert f"fill: {LIGHT_TEXT}" not in rules

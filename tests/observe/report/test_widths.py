"""Pages are read in wide and in narrow windows."""

from pathlib import Path

import pytest

from tests.browser import CHROMIUM, MISSING, look
from tests.observe.report.test_page import two_views

FITS = """
view.draw();
const all = (selector) => [...document.querySelectorAll(selector)];
const outside = (element) => {
  const { left, right, width } = element.getBoundingClientRect();
  return width > 0 && (left < 0 || right > innerWidth + 0.5);
};
return {
  width: innerWidth,
  scrolls: document.documentElement.scrollWidth > innerWidth,
  outside: all("h1, h2, button, input, output, canvas, li, dd").filter(outside)
    .map((element) => element.outerHTML.slice(0, 80)),
  painted: all("canvas").map((canvas) => canvas.toDataURL().length),
};
"""


@pytest.mark.processes
@pytest.mark.skipif(CHROMIUM is None, reason=MISSING)
@pytest.mark.parametrize("width", [1280, 480])
def test_a_page_fits_into_its_window(width: int, tmp_path: Path):
    seen, console = look(two_views(), FITS, tmp_path, size=(width, 900))
    assert console == []
    assert (seen["width"], seen["scrolls"], seen["outside"]) == (width, False, [])
    assert len(seen["painted"]) >= 3
    assert min(seen["painted"]) > 1000

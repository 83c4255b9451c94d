"""Print a table or figure of the paper, ours beside the published, and draw it.

python -m scripts.paper table2
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.paper import figures
from scripts.paper.draw import NEEDS, can_draw, draw
from scripts.paper.results import Result
from scripts.paper.tables import table2, table3

EXPERIMENTS: dict[str, Callable[[], Result]] = {
    "table2": table2,
    "table3": table3,
    "table4": figures.table4,
    "fig2": figures.fig2,
    **{f"fig{number}": getattr(figures, f"fig{number}") for number in range(5, 15)},
    "ablation": figures.ablation,
}
PICTURES = Path("out/paper")


def main(argv: Sequence[str] | None = None) -> int:
    """Print and draw the experiment that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.paper", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("name", choices=EXPERIMENTS, help="a table or figure of the paper")
    parser.add_argument(
        "--pictures", type=Path, default=PICTURES, metavar="DIR", help=f"({PICTURES})"
    )
    args = parser.parse_args(argv)
    result = EXPERIMENTS[args.name]()
    print(result.text())
    if can_draw():
        print("\ndrawn in", *draw(result, args.pictures))
    else:
        print(f"\n{NEEDS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

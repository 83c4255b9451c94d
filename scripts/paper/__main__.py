"""Print a table or figure of the paper, ours beside the published.

python -m scripts.paper table2
"""

import argparse
import sys
from collections.abc import Callable, Sequence

from scripts.paper.results import Result
from scripts.paper.tables import table2, table3

EXPERIMENTS: dict[str, Callable[[], Result]] = {"table2": table2, "table3": table3}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the experiment that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.paper", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("name", choices=EXPERIMENTS, help="a table or figure of the paper")
    args = parser.parse_args(argv)
    print(EXPERIMENTS[args.name]().text())
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Print a table or figure of the paper, ours beside the published, and draw it.

python -m scripts.paper table2                             # simulated
python -m scripts.paper ablation --emit out/ablation       # jobs for SLURM
python -m scripts.paper ablation --collect out/ablation    # the same picture, of what ran
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.paper.ablation import ablation
from scripts.paper.breakdowns import fig5, table4
from scripts.paper.curves import fig14
from scripts.paper.draw import draw
from scripts.paper.figures import FIGURES
from scripts.paper.jobs import collect, emit
from scripts.paper.results import Result
from scripts.paper.tables import table2, table3

EXPERIMENTS: dict[str, Callable[..., Result]] = {
    "table2": table2,
    "table3": table3,
    "table4": table4,
    "fig5": fig5,
    **FIGURES,
    "fig14": fig14,
    "ablation": ablation,
}
OF_NO_RUN = {
    "table4": "an iteration's trace has no copies that computation hides",
    "fig5": "its bars are columns of table2",
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
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--simulate", action="store_true", help="(the default)")
    source.add_argument("--emit", type=Path, metavar="DIR", help="write sbatch files into DIR")
    source.add_argument("--collect", type=Path, metavar="DIR", help="show what those of DIR ran")
    args = parser.parse_args(argv)
    try:
        experiment, reason = EXPERIMENTS[args.name], OF_NO_RUN.get(args.name)
        if reason and (args.emit or args.collect):
            parser.error(f"{args.name} has no jobs: {reason}")
        if args.emit:
            print("\n".join(emit(args.name, experiment, args.emit)))
            return 0
        result = collect(args.name, experiment, args.collect) if args.collect else experiment()
    except ValueError as error:
        parser.error(str(error))
    print(result.text())
    try:
        print("\ndrawn in", *draw(result, args.pictures, measured=args.collect is not None))
    except ValueError as error:
        print(f"\n{error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

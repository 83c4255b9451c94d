"""What the commands of the benches share: how they read options, and print tables row by row."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from scripts.bench.runner import preload
from scripts.bench.summary import markdown
from scripts.bench.testbed import TestbedError, end_on_signals, refuse


def parser_of(text: str | None, logs: str = "") -> argparse.ArgumentParser:
    """Return a parser whose help shows a module's text as it is; logs go below ``out/``."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if logs:
        folder = Path(__file__).parents[2] / "out" / logs
        parser.add_argument("--logs", type=Path, default=folder, help=f"(out/{logs})")
    return parser


def print_table(program: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> int:
    """Print a table while its rows are measured; returns the exit code."""
    end_on_signals()
    try:
        preload()
        for line in markdown(titles, rows):
            print(line, flush=True)
    except (TestbedError, ValueError) as error:
        return refuse(program, error)
    return 0

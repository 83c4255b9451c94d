"""How the commands of the benches read options."""

import argparse
from pathlib import Path


def parser_of(text: str | None, logs: str = "") -> argparse.ArgumentParser:
    """Return a parser whose help shows a module's text as it is; logs go below ``out/``."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if logs:
        folder = Path(__file__).parents[2] / "out" / logs
        parser.add_argument("--logs", type=Path, default=folder, help=f"(out/{logs})")
    return parser

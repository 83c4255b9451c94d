"""How the commands of the benches read options."""

import argparse


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows a module's text as it is."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )

"""The type of what ``ArgumentParser.add_argument_group`` returns, which argparse keeps private."""

from argparse import _ArgumentGroup as ArgumentGroup

__all__ = ["ArgumentGroup"]

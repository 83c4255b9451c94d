"""The return type of ``ArgumentParser.add_argument_group``, which argparse keeps private."""

from argparse import _ArgumentGroup as ArgumentGroup

__all__ = ["ArgumentGroup"]

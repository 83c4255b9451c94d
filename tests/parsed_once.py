"""Imported by the server that test ranks are forked from: reads Megatron's flags' sources once.

Megatron's parser takes help texts from the docstrings of 39 classes, and parses the classes' source
files for them each time that a parser is built: a fifth of the CPU time of a small training run.
"""

from argparse import ArgumentParser

from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments

_read = ArgumentGroupFactory._get_field_docstrings
_known: dict[type, dict[str, str]] = {}


def _read_once(self: ArgumentGroupFactory, cls: type) -> dict[str, str]:
    if cls not in _known:
        _known[cls] = _read(self, cls)
    return dict(_known[cls])


ArgumentGroupFactory._get_field_docstrings = _read_once
add_megatron_arguments(ArgumentParser())

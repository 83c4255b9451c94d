"""The server that test ranks are forked from imports this last: it makes their start cheap.

Megatron's work around training is done once or not at all, never what it does in training. Ranks
that are started by a command line, as in SLURM's test, have all of it.
"""

import gc
import pkgutil
import queue
from argparse import ArgumentParser
from importlib import import_module

from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.training import arguments

import fold3d_patches
from megatron.fold3d import runtime, training


def build_parser_once() -> None:
    """Keep Megatron's 800 flags; their help texts are from the parsed source of 39 classes.

    A rank parses its command line three times. Building them each time is a fourth of its work.
    """
    flags = arguments.add_megatron_arguments(ArgumentParser(add_help=False))

    def add_megatron_arguments(parser: ArgumentParser) -> ArgumentParser:
        parser._add_container_actions(flags)  # what ArgumentParser(parents=[flags]) does
        return parser

    arguments.add_megatron_arguments = add_megatron_arguments


build_parser_once()
for package in (fold3d_patches, runtime, training):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        import_module(module.name)  # it has no effect (tests/test_dependency_rules.py)
# Instead of 100,000 documents of 2,000 tokens each: 12 million samples to shuffle on each rank, of
# which a test trains a few dozen.
MockGPTLowLevelDataset.size = 1000
# A rank writes its checkpoint itself. Megatron asks a process of its own for the results, for
# asynchronous writers' sake, and that process would import torch.
filesystem_async.get_write_results_queue = queue.Queue
gc.freeze()  # none of this is garbage: a rank that looks whether it is would copy all of it

"""The server that test ranks are forked from imports this last: it makes their start cheap.

Megatron's work around training is done once or not at all, never what it does in training. Ranks
that are started by a command line, as in SLURM's test, have all of it.
"""

import gc
import queue
from argparse import ArgumentParser

from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.training.argument_utils import ArgumentGroupFactory
from megatron.training.arguments import add_megatron_arguments


def read_docstrings_once() -> None:
    """Keep the help texts of Megatron's flags, for which it parses the source of 39 classes.

    It does so each time that a parser is built: a fifth of the CPU time of a small training run.
    """
    read = ArgumentGroupFactory._get_field_docstrings
    known: dict[type, dict[str, str]] = {}

    def read_once(self: ArgumentGroupFactory, cls: type) -> dict[str, str]:
        if cls not in known:
            known[cls] = read(self, cls)
        return dict(known[cls])

    ArgumentGroupFactory._get_field_docstrings = read_once
    add_megatron_arguments(ArgumentParser())


read_docstrings_once()
# Instead of 100,000 documents of 2,000 tokens each: 12 million samples to shuffle on each rank, of
# which a test trains a few dozen.
MockGPTLowLevelDataset.size = 1000
# A rank writes its checkpoint itself. Megatron asks a process of its own for the results, for
# asynchronous writers' sake, and that process would import torch.
filesystem_async.get_write_results_queue = queue.Queue
gc.freeze()  # none of this is garbage: a rank that looks whether it is would copy all of it

"""The flags of ``fold3d simulate`` beside those of costs and checkpoints."""

from argparse import ArgumentParser
from pathlib import Path

from megatron.fold3d.commands.layer_options import layers_or_auto
from megatron.fold3d.commands.megatron_flags import add_training_flags
from megatron.fold3d.commands.schedule_options import add_schedule_options
from megatron.fold3d.config.recompute_flags import counts_or_auto
from megatron.fold3d.plan.device_queues import CONNECTIONS

_GRAD_SYNC: tuple[str, ...] = ("serial", "overlap", "deferred")


def add_simulate_flags(parser: ArgumentParser) -> None:
    """Add the options that say what is simulated, and what is written."""
    add_training_flags(parser, "with --cluster, in place of --schedule, sizes and a model")
    add_schedule_options(parser, required=False)
    parser.add_argument(
        "--grad-sync",
        choices=_GRAD_SYNC,
        help="DP.sync after everything, behind other segments' backwards (default), or also "
        "behind the next iteration's forwards, the most urgent first",
    )
    parser.add_argument(
        "--preemptive-comm",
        action="store_true",
        help="PP.sync goes before DP.sync on a link, up to a pause budget",
    )
    parser.add_argument(
        "--cuda-connections",
        type=int,
        choices=CONNECTIONS,
        metavar="N",
        help="on GPUs with CUDA_DEVICE_MAX_CONNECTIONS=N: 1, 8 or 32 hardware queues that all "
        "streams share (default: a queue for each, and launches hold up nothing)",
    )
    parser.add_argument(
        "--grad-sync-launches",
        type=int,
        metavar="N",
        help="with --cuda-connections: collectives that DP.sync of a model chunk is launched as "
        "(default: 1; of a model, as training cuts it)",
    )
    parser.add_argument(
        "--iterations",
        type=int,
        metavar="N",
        help="(default: 1; with --grad-sync deferred as many as it takes to settle)",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the diagram here")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write a page that simulates schedules side by side, with sliders that begin here",
    )
    parser.add_argument("--json", action="store_true", help="the result as one JSON object")
    parser.add_argument(
        "--recompute-layers",
        type=counts_or_auto,
        metavar="N,N",
        help="with --recompute full of a model, recompute so many layers of each stage; auto is "
        "the fewest that fit the GPUs' memory",
    )
    parser.add_argument(
        "--layers",
        type=layers_or_auto,
        metavar="N,N",
        help="of a model, so many layers in each stage (default: equally many); auto is what makes "
        "the iteration shortest and fits the GPUs' memory",
    )

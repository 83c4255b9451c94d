"""Flags of ours that are parts of ``--schedule`` now: refused, with the new spelling."""

from argparse import SUPPRESS, ArgumentTypeError, _ActionsContainer
from collections.abc import Mapping
from functools import partial
from typing import NoReturn

# By flag, what to give instead; {} is the flag's value.
RETIRED = {
    "--plan-file": "--schedule plan={}",
    "--aiao-last-segment": "--schedule afab, or aiao for 1f1b",
    "--forwards-ahead": "--schedule ORDER:ahead={}",
    "--overlap-tensor-parallel": "--schedule ORDER:pairs=on",
    "--backward-share": "--schedule ORDER:step=next, and :share={} where it is a number",
    "--dp-slices": "--schedule ORDER:slices={}",
    "--dp-slice-bytes": "--schedule ORDER:slice-bytes={}",
    "--delay-weight-grads": "--schedule ORDER:wgrad=last@{}, wgrad=behind@{} where an all-reduce "
    "ends with the iteration, or wgrad=gaps for auto",
    "--from-flags": "the flags themselves, behind --",
    "--group-size": "--schedule interleaved:group={}",
    "--early-dp-sync": "--schedule ORDER:wgrad=behind@{}",
    "--most-activations": "--schedule ORDER:held={}",
    "--replicate-optimizer": "--schedule ORDER:optimizer=replicated@{}, or optimizer=auto",
    "--recompute-early": "--schedule ORDER:recompute=early@SEGMENTS, which are not stages",
    "--pp-traffic-class": "--traffic-class pp={}",
    "--dp-traffic-class": "--traffic-class dp={}",
}


def add_retired_flags(group: _ActionsContainer, retired: Mapping[str, str] = RETIRED) -> None:
    """Add flags that are refused, and shown in no help."""
    for flag, instead in retired.items():
        group.add_argument(
            flag,
            type=partial(_refuse, instead),
            nargs="?",
            const="X",
            default=SUPPRESS,
            help=SUPPRESS,
        )


def _refuse(instead: str, value: str) -> NoReturn:
    raise ArgumentTypeError(f"there is no such flag any more; give {instead.replace('{}', value)}")

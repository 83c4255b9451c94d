"""Flags of ours that are parts of ``--schedule`` now: refused, with the new spelling."""

from argparse import SUPPRESS, Action, ArgumentError, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.fold3d.config.argument_group import ArgumentGroup

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


class _Refuse(Action):
    def __call__(
        self,
        parser: ArgumentParser,
        namespace: Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Refuse the flag; the message names it."""
        text = str(self.const)  # which stands for no value
        instead = text.replace("{}", "X" if values == text else str(values))
        raise ArgumentError(self, f"there is no such flag any more; give {instead}")


def add_retired_flags(
    group: ArgumentGroup | ArgumentParser, retired: Mapping[str, str] = RETIRED
) -> None:
    """Add flags that are refused, and shown in no help."""
    for flag, instead in retired.items():
        group.add_argument(
            flag, action=_Refuse, nargs="?", const=instead, default=SUPPRESS, help=SUPPRESS
        )

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

__all__ = ["add_arguments", "bridge", "install", "parse_args"]

def parse_args(
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    *,
    ignore_unknown_args: bool = False,
) -> Namespace: ...
def add_arguments(parser: ArgumentParser) -> ArgumentParser: ...
def install(args: Namespace) -> ExitStack: ...
def bridge(**flags: Any) -> ExitStack: ...

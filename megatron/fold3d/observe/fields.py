"""Data classes from JSON and TOML files, and fields that are checked wherever they come from."""

import json
import tomllib
from collections.abc import Callable, Container
from dataclasses import MISSING, fields
from math import isfinite
from pathlib import Path
from typing import Any

from megatron.fold3d.plan.files import read_file


def is_file_name(name: str) -> bool:
    """True if a name stands for a file that `from_file` reads."""
    return name.endswith((".json", ".toml"))


def read_text(path: Path) -> str:
    """Return the text in a file that a user named.

    Raises:
        ValueError: the file is not text, or too long; the message begins with its path.
        OSError: the file cannot be read.
    """
    try:
        return read_file(path).decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not text in UTF-8") from None


def read_as[T](path: Path, parse: Callable[[str], T]) -> T:
    """Return what ``parse`` makes of the text in a file that a user named.

    Raises:
        ValueError: as `read_text`, or of ``parse``; the message begins with the path.
        OSError: the file cannot be read.
    """
    text = read_text(path)
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse_json(text: str, parse: Callable[[str], Any] = json.loads) -> Any:
    """Return the value of a text in JSON, or in the language that ``parse`` reads.

    Raises:
        ValueError: the text is not in it.
    """
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def from_file[T](path: Path, kind: type[T], what: str) -> T:
    """Return an object of a data class from a file; a ``name`` is the file's unless it has one.

    Args:
        path: a TOML file with one ``field = value`` per line, or a JSON file with one object.
        what: the name for such an object in messages.

    Raises:
        ValueError: the file cannot be read, or its fields are not those of the class.
    """
    try:
        parse = tomllib.loads if path.suffix == ".toml" else json.loads
        found = parse_json(read_text(path), parse)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"cannot read a {what} from {path}: {reason}") from None
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} holds a {type(found).__name__}; it must hold the fields of a {what}"
        )
    members = fields(kind)  # type: ignore[arg-type]
    needed = {f.name for f in members if f.default is MISSING} - {"name"}
    known = {f.name for f in members}
    if missing := sorted(needed - set(found)):
        raise ValueError(
            f"{path} lacks {', '.join(missing)}; a {what} needs {', '.join(sorted(needed))}"
        )
    if unknown := sorted(set(found) - known):
        raise ValueError(
            f"{path} has unknown fields {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
    named = {"name": path.stem} if "name" in known else {}
    try:
        return kind(**named | found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def check_fields(of: Any, *, may_be_zero: Container[str] = ()) -> None:
    """Check that the fields of a data class hold numbers, text and truth values as they should.

    Args:
        of: the object; ``int`` fields must hold whole numbers, and all numbers be above zero. A
            field of ``int | None`` may hold None or zero as well.
        may_be_zero: fields that may be zero although they are not by default.

    Raises:
        ValueError: a field has another type, or its number is not finite, negative, or zero.
    """
    for field in fields(of):
        value, name, kind = getattr(of, field.name), field.name, field.type
        if kind == int | None and value is not None:
            kind = int
        for known, what in ((str, "text"), (bool, "true or false")):
            if kind is known and not isinstance(value, known):
                raise ValueError(f"found {name}={value!r}; it is {what}")
        if kind not in (int, float):
            continue
        if not is_number(value):
            raise ValueError(f"found {name}={value!r}; it is a number")
        if kind is int and not isinstance(value, int):
            raise ValueError(f"found {name}={value}; it is a whole number")
        zero = kind is not field.type or field.default == 0 or name in may_be_zero
        if value < 0 or (value == 0 and not zero):
            raise ValueError(
                f"found {name}={value}; it is {'zero or more' if zero else 'above zero'}"
            )


def is_number(value: object) -> bool:
    """True if a value is a number that a float can hold; ``True`` is not a number here."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return isfinite(value)
    except OverflowError:  # a whole number beyond what a float holds
        return False

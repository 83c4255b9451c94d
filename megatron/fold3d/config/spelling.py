"""The spelling of flags and values in messages: as a user types them."""


def flag_of(attribute: str) -> str:
    """Return the flag that sets an attribute of Megatron's namespace."""
    return f"--{attribute.replace('_', '-')}"


def typed(flag: str, value: object) -> str:
    """Return a flag and its value as a user types them."""
    if isinstance(value, bool):
        return flag
    if isinstance(value, tuple):
        return f"{flag} {','.join(map(str, value))}"
    return " ".join([flag, *map(str, value if isinstance(value, list) else [value])])


def named(schedule: str) -> str:
    """Return ``--schedule`` with the name of a schedule."""
    return f"--schedule {'plan=FILE' if schedule.startswith('plan=') else schedule}"

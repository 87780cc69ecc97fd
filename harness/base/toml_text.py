"""TOML from people: what cannot be read is a ValueError, whatever is wrong with it."""

import tomllib
from typing import Any


def from_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: It is invalid, or nested deeper than Python can follow.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply to be read") from None

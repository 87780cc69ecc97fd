"""From what a user types to a strategy with its options: `usp:4x2`, `double_ring:inner=2`."""

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from harness.base.numbers import received
from harness.planning.chosen import Chosen
from harness.planning.options import COMMON_OPTIONS, LAYER_OPTIONS, Common, options_of
from harness.planning.strategy import Strategy

_EVERYBODY = (*COMMON_OPTIONS, *LAYER_OPTIONS)


def choose(strategy: Strategy[Any], typed: str, text: str) -> Chosen:
    """Read the options of a strategy.

    Args:
        strategy: The strategy.
        typed: The text behind its name and a colon: `option=value,option=value`.
        text: All that was typed, for messages.

    Raises:
        ValueError: Unknown option or value; the choices are listed.
    """
    parts = [part for each in filter(None, typed.split(",")) for part in _spelled(each, strategy)]
    keys = [_key(part) for part in parts]
    if again := next((key for at, key in enumerate(keys) if key in keys[:at]), None):
        raise ValueError(
            f"{strategy.name}: option ({again}) must be given once; {text} has it twice"
        )
    chosen = Chosen(strategy, strategy.defaults)
    for part in parts:
        chosen = _with_option(chosen, part)
    return chosen


def by_alias(strategies: Iterable[Strategy[Any]]) -> dict[str, tuple[Strategy[Any], str]]:
    """Return strategies by other projects' names for them, with the options that a name means."""
    return {
        name: (strategy, options)
        for strategy in strategies
        for name, _, options in (alias.partition(":") for alias in strategy.aliases)
    }


def with_options(meant: str, typed: str) -> str:
    """Join the options that an alias means and those that were typed, which go first."""
    given = {_key(part) for part in typed.split(",")}
    kept = [part for part in meant.split(",") if part and _key(part) not in given]
    return ",".join(filter(None, (*kept, typed)))


def _key(part: str) -> str:
    return part.partition("=")[0].replace("-", "_")


def _spelled(part: str, strategy: Strategy[Any]) -> tuple[str, ...]:
    """Spell a mesh, `4x2`, as the two options that it is."""
    mesh = re.fullmatch(r"(\d*)x(\d*)", part)
    if mesh is None or strategy.mesh is None:
        return (part,)
    return tuple(
        f"{name}={value}" for name, value in zip(strategy.mesh, mesh.groups(), strict=True)
    )


def _with_option(chosen: Chosen, part: str) -> Chosen:
    strategy, key = chosen.strategy, _key(part)
    value = part.partition("=")[2]
    own, common = options_of(strategy.defaults), options_of(Common)
    if key not in own and key not in common:
        raise ValueError(_unknown(strategy, key, part))
    try:
        read = {**own, **common}[key].reader.read(value)
    except ValueError as error:
        raise ValueError(f"{strategy.name}: {key} ({received(value)}): {error}") from None
    if key in own:
        return replace(chosen, options=replace(chosen.options, **{key: read}))
    return replace(chosen, common=replace(chosen.common, **{key: read}))


def _unknown(strategy: Strategy[Any], key: str, part: str) -> str:
    """List the options that may be typed where one is unknown."""
    known = ", ".join(f"{name}=" for name in sorted(options_of(strategy.defaults)))
    mesh = ""
    if strategy.mesh is not None and re.fullmatch("[0-9]+", part):
        first, second = strategy.mesh
        mesh = f"{part}x2 ({first.capitalize()} x {second}) or {first}={part}, or "
    return (
        f"{strategy.name}: option ({key}) is unknown; it takes {mesh}{known or 'no options'}, and "
        f"as all do {', '.join(f'{name}=' for name in _EVERYBODY)}; `list` shows their values"
    )

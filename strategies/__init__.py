"""The strategies: one short file each; adding one is a file and a line here."""

from collections.abc import Mapping
from dataclasses import replace
from pkgutil import resolve_name
from typing import Any

from harness.errors import UnsupportedError
from harness.planning.chosen import Chosen
from harness.planning.options import options_of
from harness.planning.peers import is_peer
from harness.planning.spelling import by_alias, choose, with_options
from harness.planning.strategy import Strategy
from patterns import outside


def _table(*entries: str) -> Mapping[str, Strategy[Any]]:
    found: list[Strategy[Any]] = [resolve_name(f"strategies.{entry}") for entry in entries]
    return {strategy.name: strategy for strategy in found}


EVERY_STRATEGY = _table(
    "ring:STRATEGY",
    "ring:CLASSIC",
    "ring_q:STRATEGY",
    "tasp:STRATEGY",
    "zigzag:STRATEGY",
    "stripe:STRATEGY",
    "double_ring:STRATEGY",
    "allgather:STRATEGY",
    "ulysses:STRATEGY",
    "usp:STRATEGY",
    "owner:STRATEGY",
    "grid:STRATEGY",
    "mesh:STRATEGY",
    "dynamic:STRATEGY",
    "hypergraph:STRATEGY",
    "ultraattn.strategy:STRATEGY",
    "ultraattn.strategy:PUBLISHED",
    "upipe:STRATEGY",
    "fpdt:STRATEGY",
)
"""File and name in it, one a line."""

STRATEGIES = {name: each for name, each in EVERY_STRATEGY.items() if not each.layers_only}
"""Those that plan attention, and so any layer around it."""

DEFAULT_STRATEGY = "zigzag"
"""Strategy that is used where none is named."""

AUTO = "auto"
"""Stands for the strategy that is recommended; see `harness.recommend`."""

BASE = "ring"
"""The plainest, with which others are compared."""

LAYER_STRATEGIES = {name: each for name, each in EVERY_STRATEGY.items() if each.layers_only}
"""Those that plan whole layers only, because projections are part of them."""

DIRECT = {name: each for name, each in EVERY_STRATEGY.items() if each.report is None}
"""Those that follow a rule, rather than search for their plan under a limit of time."""

_ALIASES = by_alias(EVERY_STRATEGY.values())


def strategy(text: str) -> Chosen:
    """Read a strategy with its options: `ring`, `usp:4x2`, `mypkg.myring:STRATEGY:hops=2`.

    Raises:
        ValueError: Unknown name, option or value; the choices are listed.
        UnsupportedError: It is another project's code, which has no plan.
    """
    if is_peer(text):
        raise UnsupportedError(
            f"{text}: it is another project's code and has no plan; measure or check it",
            ("sweep --mode measure", "check"),
        )
    name, options = outside.split_name(text, {**EVERY_STRATEGY, **_ALIASES}, outside.STRATEGY_GROUP)
    _, meant = _ALIASES.get(name, (None, ""))
    return choose(named(name), with_options(meant, options), text)


def named(name: str) -> Strategy[Any]:
    """Find a strategy by its name without options; one from outside is named as it was typed.

    Raises:
        ValueError: The name is unknown, or what it names cannot be imported.
    """
    ours = EVERY_STRATEGY.get(name)
    if ours is None and name in _ALIASES:
        ours, _ = _ALIASES[name]
    if ours is not None:
        return ours
    try:
        found: Strategy[Any] | None = outside.find(name, outside.STRATEGY_GROUP, Strategy)
    except ValueError as error:
        other = outside.ways_out(dict(sorted(EVERY_STRATEGY.items())), outside.STRATEGY_GROUP)
        raise ValueError(f"strategy ({name}) {error}; {other}") from None
    if found is None:
        known = ", ".join(sorted({**EVERY_STRATEGY, **outside.registered(outside.STRATEGY_GROUP)}))
        near = outside.did_you_mean(name, {**EVERY_STRATEGY, **_ALIASES})
        raise ValueError(f"strategy ({name}) is unknown{near}; choose from {known}")
    return replace(found, name=name)


def comparable(cp: int, among: Mapping[str, Strategy[Any]] = STRATEGIES) -> tuple[str, ...]:
    """Spell strategies as they are worth comparing on some ranks: the one list of candidates.

    First each with its defaults, then with the options that it asks to be compared with, then with
    every degree that divides cp, and every mesh of cp ranks: with axes of one rank or of all it is
    another strategy.

    Args:
        cp: Ranks.
        among: The strategies.
    """
    inner = [degree for degree in range(2, cp) if cp % degree == 0]
    return (
        *among,
        *(f"{name}:{text}" for name, each in among.items() for text in each.compared),
        *(
            f"{name}:{each.degree}={d}"
            for name, each in among.items()
            if each.degree
            for d in inner
        ),
        *(f"{name}:{u}x{cp // u}" for name, each in among.items() if each.mesh for u in inner),
    )


SAVED = ("", "checkpoint=attention", "checkpoint=layer")
"""What a layer saves for backward, as options are typed; first the default."""


def comparable_layers(cp: int, among: Mapping[str, Strategy[Any]]) -> tuple[str, ...]:
    """Spell candidates as `comparable` does, of whole layers: with all that a layer may save.

    Each also rests what it saves on the host.
    """
    more = [
        ",".join(filter(None, (saved, rest))) for saved in SAVED for rest in ("", "offload=true")
    ]
    return tuple(
        f"{text}{',' if ':' in text else ':'}{options}" if options else text
        for options in more
        for text in comparable(cp, among)
    )


def quick(name: str) -> str:
    """Spell a strategy so that it plans in little time: for checks of many small problems."""
    timed = "seconds" in options_of(EVERY_STRATEGY[name].defaults)
    return f"{name}:seconds=0.02" if timed else name

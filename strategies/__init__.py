"""The strategies: one short file each; adding one is a file and a line here."""

from collections.abc import Mapping
from pkgutil import resolve_name

from harness.planning.strategy import Chosen, Strategy, choose


def _table(*entries: str) -> Mapping[str, Strategy]:
    found: list[Strategy] = [resolve_name(f"strategies.{entry}") for entry in entries]
    return {strategy.name: strategy for strategy in found}


STRATEGIES = _table(
    "ring:STRATEGY",
    "ring:CLASSIC",
    "zigzag:STRATEGY",
    "stripe:STRATEGY",
    "double_ring:STRATEGY",
    "allgather:STRATEGY",
    "ulysses:STRATEGY",
    "usp:STRATEGY",
    "owner:STRATEGY",
    "grid:STRATEGY",
    "ultraattn.strategy:STRATEGY",
    "ultraattn.strategy:PUBLISHED",
)
"""Those that plan attention, and so any layer around it: file and name in it, one a line."""

LAYER_STRATEGIES = _table("upipe:STRATEGY", "fpdt:STRATEGY")
"""Those that plan whole layers only, because projections are part of them."""

EVERY_STRATEGY: Mapping[str, Strategy] = {**STRATEGIES, **LAYER_STRATEGIES}


def strategy(text: str) -> Chosen:
    """Read a strategy with its options: `ring`, `usp:4x2`, `double_ring:inner=2`.

    Raises:
        ValueError: Unknown name, option or value; the choices are listed.
    """
    return choose(text, EVERY_STRATEGY)


DIRECT: Mapping[str, Strategy] = {
    name: each for name, each in EVERY_STRATEGY.items() if each.report is None
}
"""Those that follow a rule, rather than search for their plan under a limit of time."""


def quick(name: str) -> str:
    """Spell a strategy so that it plans in little time: for checks of many small problems."""
    return name if EVERY_STRATEGY[name].report is None else f"{name}:seconds=0.02"

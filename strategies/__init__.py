"""The strategies: one short file each; adding one is a file and a line here."""

from collections.abc import Mapping

from harness.strategy import Chosen, Strategy, choose
from strategies import (
    allgather,
    double_ring,
    fpdt,
    grid,
    owner,
    ring,
    stripe,
    ulysses,
    upipe,
    usp,
    zigzag,
)

STRATEGIES: Mapping[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        ring.STRATEGY,
        ring.CLASSIC,
        zigzag.STRATEGY,
        stripe.STRATEGY,
        double_ring.STRATEGY,
        allgather.STRATEGY,
        ulysses.STRATEGY,
        usp.STRATEGY,
        owner.STRATEGY,
        grid.STRATEGY,
    )
}
"""Those that plan attention, and so any layer around it."""

LAYER_STRATEGIES: Mapping[str, Strategy] = {
    strategy.name: strategy for strategy in (upipe.STRATEGY, fpdt.STRATEGY)
}
"""Those that plan whole layers only, because projections are part of them."""

EVERY_STRATEGY: Mapping[str, Strategy] = {**STRATEGIES, **LAYER_STRATEGIES}


def strategy(text: str) -> Chosen:
    """Read a strategy with its options: `ring`, `usp:4x2`, `double_ring:inner=2`.

    Raises:
        ValueError: Unknown name, option or value; the choices are listed.
    """
    return choose(text, EVERY_STRATEGY)

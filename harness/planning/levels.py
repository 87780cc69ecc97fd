"""The levels of the planner, each of which can be left out."""

from enum import StrEnum


class Level(StrEnum):
    """One level of the paper's pipeline, from the whole sequence to single kernels, and two more.

    Those that the paper has not: GATHER brings keys by collectives, so that a chunk enters a node
    once and one kernel attends all that a rank has; HEADS lets ranks share heads, not tokens alone.

    Source: UltraAttn (SC'25), Figure 4, and section 4.4 for the schedule.
    """

    REMAP = "remap"
    NODE = "node"
    DEVICE = "device"
    KERNEL = "kernel"
    SCHEDULE = "schedule"
    GATHER = "gather"
    HEADS = "heads"


ALL_LEVELS = frozenset(Level)


def read_levels(text: str) -> frozenset[Level]:
    """Read `all`, `none`, or names joined by `+`, such as `node+device`.

    Raises:
        ValueError: A name is unknown (the choices are listed) or stands there twice.
    """
    if text in ("all", "none"):
        return ALL_LEVELS if text == "all" else frozenset()
    names = text.split("+")
    whole = [name for name in names if name in ("all", "none")]
    if whole:
        raise ValueError(
            f"{whole[0]!r} must stand alone, as levels={whole[0]}; or join some of "
            f"{', '.join(Level)} by +"
        )
    unknown = [name for name in names if name not in tuple(Level)]
    if unknown:
        choices = ", ".join(Level)
        raise ValueError(
            f"level {unknown[0]!r} is unknown; join some of {choices} by +, or all, none"
        )
    repeated = [name for at, name in enumerate(names) if name in names[:at]]
    if repeated:
        raise ValueError(f"level {repeated[0]!r} is named twice in {text!r}; name each once")
    return frozenset(map(Level, names))


def spell_levels(levels: frozenset[Level]) -> str:
    """Return the spelling that `read_levels` reads, in the order of the pipeline."""
    if levels in (ALL_LEVELS, frozenset()):
        return "all" if levels else "none"
    return "+".join(level for level in Level if level in levels)

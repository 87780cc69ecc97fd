"""Results of a search planner, one line of text per level."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.plan.problem import Direction
from harness.planning.levels import Level, read_levels

_MIB = 2**20
_OWN = "ultraattn"  # the planner's own plan, among candidates
_MOVED = {
    Direction.FORWARD: ("Q", "K and V", "partial out"),
    Direction.BACKWARD: ("Q and dO", "K and V", "partial dQ", "dK and dV"),
}
_WEIGHTS = ("row_in", "column_in", "row_out", "column_out")
_COUNTED = {
    "paper": "as the paper counts, to a quarter",
    "shipped": "as shipped, partial results in their precision, to a quarter",
}
_BRIEF = {"paper": "by the paper's counts", "shipped": "as shipped"}
_FRACTIONS = {0.0: "no slack", 0.5: "slack half a block", 1.0: "slack a block"}


def level_lines(levels: Mapping[str, Any], direction: Direction) -> str:
    """Return a line per tiling and schedule: value, bound, gap, rule and origin.

    Args:
        levels: A planner's report; nothing for strategies that do not search.
        direction: Of the plan.
    """
    lines = list(_lines(levels, direction)) if levels else []
    return "".join(f"{name:<13} {value}\n" for name, value in lines)


def _lines(levels: Mapping[str, Any], direction: Direction) -> Iterator[tuple[str, str]]:
    yield "planned for", f"{levels['cluster']}, {levels['gpus_per_node']} GPUs a node"
    if levels.get("candidates_s"):
        yield "taken", _taken(levels)
    yield from _mesh(levels)
    yield from _tilings(levels, direction)
    remap = levels.get("remap", {})
    if remap.get("order"):
        yield "remap", " ".join(map(str, remap["order"]))
    if remap.get("placement"):
        yield "remap", f"tokens dealt as a {remap['placement']}"
    if "kernel" in levels:
        yield "kernels", f"{levels['kernel']['kept']} replacements"
    if not levels.get("fallback"):
        yield "timeline", _timeline(levels)
    if "schedule" in levels:
        each = levels["schedule"]
        yield (
            "schedule",
            f"{_ms(each['makespan_s'])} by that timeline, "
            f"lower bound for any order of these tasks {_ms(each['bound_s'])}, "
            f"gap {each['gap']:.1%} ({each['source']}, {each['seconds']:.1f} s)",
        )
    if "memory" in levels:
        yield "memory", _memory(levels["memory"])
    if levels.get("refined") is False:
        yield "refined", "no: fusing and scheduling would not make it faster"
    yield (
        "planned as",
        f"for {levels['made_for']}, to which times and chunks above refer: these are unknown when "
        "tokens are dealt to ranks, so the placement must not depend on them",
    )


def _memory(held: Mapping[str, Any]) -> str:
    """Say how a cap of memory is kept."""
    said = f"{held['peak_bytes'] / 2**30:.3g} of at most {held['cap_bytes'] / 2**30:.3g} GiB"
    said += f", planned with levels {'+'.join(held['levels']) or 'none'}"
    if held["ahead"] is None:
        return said
    return f"{said}; inputs are fetched for the next tile and {held['ahead']} more"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"


def _taken(levels: Mapping[str, Any]) -> str:
    """Say whose plan was taken, with its time and that of the planner's own or the next one."""
    times, other = levels["candidates_s"], levels["fallback"]
    if other:
        return f"{other}'s plan, simulated {_ms(times[other])}; own plan {_ms(times[_OWN])}"
    said = f"own plan, simulated {_ms(times[_OWN])}"
    rest = {name: seconds for name, seconds in times.items() if name != _OWN}
    if not rest:
        return said
    least = min(rest, key=lambda name: rest[name])
    return f"{said}; the fastest other is {least}'s, {_ms(rest[least])}"


def _timeline(levels: Mapping[str, Any]) -> str:
    said = f"{_ms(levels['makespan_s'])} by the planner's own timeline on {levels['cluster']}"
    if levels["calibrated"]:
        said += ", without the calibration's further effects, such as transfers that slow kernels"
    return said


def _mesh(levels: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Say who shares heads and how keys come, if the plan is of heads and context."""
    if Level.HEADS not in levels:
        return
    heads, keys = levels[Level.HEADS], levels[Level.GATHER]
    shares = heads["inside"] * heads["between"]
    stages = "all at once" if heads["stages"] == 1 else f"in {heads['stages']} stages"
    yield (
        "heads",
        f"{shares} shares ({heads['inside']} inside a node x {heads['between']} between nodes), "
        f"attended {stages}",
    )
    if keys["parts"] > 1:
        yield (
            "context",
            f"{keys['parts']} parts, {keys['way']}; tokens dealt: {keys['dealt']}, "
            f"imbalance {keys['imbalance']:.2f}",
        )


def _tilings(levels: Mapping[str, Any], direction: Direction) -> Iterator[tuple[str, str]]:
    every = [("nodes", levels[Level.NODE])] if Level.NODE in levels else []
    every += [("devices", each) for each in levels.get(Level.DEVICE, ())]
    found = [(name, each) for name, each in every if each["devices"] > 1]  # one has no choice
    for name, each in found:
        yield (
            name,
            f"{each['blocks']} blocks on {each['devices']}: at most {_count(each['value'])} "
            f"chunks, bound {_count(each['bound'])}, gap {each['gap']:.1%} ({each['status']}, "
            f"{each['source']}, {each['seconds']:.1f} s); {_rule(each['rule'])}",
        )
    yield from dict.fromkeys(("chunks", _chunk(name, each, direction)) for name, each in found)
    if levels.get("allocation") == "row owner":
        on = read_levels(levels["on"])
        if on & {Level.NODE, Level.DEVICE}:
            yield "tilings", "none found that beats computing blocks at their rows' owners"
        else:
            yield "tilings", f"not searched (levels={levels['on']}): blocks at their rows' owners"


def _count(value: float) -> str:
    """Return a number with two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _rule(rule: Mapping[str, Any]) -> str:
    slack = rule["slack_blocks"]
    parts = [
        _BRIEF[rule["counted"]],
        "diagonal fixed" if rule["diagonal_fixed"] else "diagonal free",
        "loads not capped" if slack is None else _FRACTIONS.get(slack, f"slack {slack:.2g} blocks"),
    ]
    if rule["inside"]:
        parts.insert(1, "with what moves inside nodes at its speed")
    return ", ".join(parts)


def _chunk(name: str, each: Mapping[str, Any], direction: Direction) -> str:
    """Say how large a chunk is, and how many of them each moved tensor counts."""
    rule = each["rule"]
    moved = _MOVED[direction]
    counts = ", ".join(_counts(moved, [rule[weight] for weight in _WEIGHTS]))
    size = _count(each["chunk_bytes"] / _MIB)
    said = f"of {name}: 1 is {size} MiB, a chunk of queries; {counts} ({_COUNTED[rule['counted']]})"
    return said + ("; each GPU of a node moves its share" if name == "nodes" else "")


def _counts(names: Sequence[str], weights: Sequence[float]) -> Iterator[str]:
    for name, weight in zip(names, weights, strict=False):
        yield f"{name} {_count(weight)}"

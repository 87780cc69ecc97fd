"""Plans read from JSON, every field judged before it is used."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, get_args

from harness.base.json_fields import (
    each,
    of_fields,
    one_of,
    parsed,
    refused,
    row,
    typed,
    whole,
    wholes,
)
from harness.base.numbers import LARGEST_COUNT
from harness.plan.plan import Plan
from harness.plan.problem import MOST_HEADS, MOST_RANKS, Direction, Dtype, Problem
from harness.plan.tasks import (
    Collective,
    CollectiveKind,
    Delta,
    Finish,
    Free,
    Leg,
    Linear,
    LinearOp,
    Memory,
    Merge,
    Piece,
    Place,
    Resident,
    Task,
    Tensor,
    Tile,
    Transfer,
)
from patterns import make_pattern


def from_json(text: str, problem: Problem | None = None) -> Plan:
    """Read what `to_json` wrote.

    Args:
        text: The plan.
        problem: Its problem, if it is at hand: no pattern is made anew then.

    Raises:
        ValueError: The text is no plan of schema 1; names the field, the value and the rule.
    """
    body = parsed(text)
    if type(body) is dict and (type(body.get("schema")), body.get("schema")) != (int, 1):
        raise ValueError(f"plan schema ({body.get('schema')}) must be 1; write the plan again")
    body = of_fields("plan", body, _PLAN, set())
    return Plan(
        problem=problem or _read_problem(body["problem"]),
        strategy=body["strategy"],
        direction=one_of("direction", body["direction"], Direction),
        q_chunks=_table("q_chunks", body["q_chunks"]),
        kv_chunks=_table("kv_chunks", body["kv_chunks"]),
        initial=each("initial", body["initial"], _resident),
        tasks=each("tasks", body["tasks"], _read_task),
        outputs=each("outputs", body["outputs"], _resident),
        saved=each("saved", body["saved"], _resident),
    )


_PLAN: Mapping[str, tuple[type, ...]] = {
    "schema": (int,),
    "problem": (dict,),
    "strategy": (str,),
    "direction": (str,),
    **dict.fromkeys(("q_chunks", "kv_chunks", "initial", "tasks", "outputs", "saved"), (list,)),
}


_PROBLEM: Mapping[str, tuple[type, ...]] = {
    "seqlen_q": (int,),
    "seqlen_kv": (int,),
    **{field.name: get_args(field.type) or (field.type,) for field in fields(Problem)},
    "pattern": (str,),
    "pattern_content": (str,),
    "dtype": (str,),
    "alibi": (list,),
}
"""The types of a plan's and a problem's fields in JSON."""


_MOST = {
    **dict.fromkeys(("head_dim", "head_dim_v", "batch", "hidden"), LARGEST_COUNT),
    **dict.fromkeys(("heads_q", "heads_kv"), MOST_HEADS),
    "cp": MOST_RANKS,
}
"""As for flags."""


MOST_CHUNKS = 4096
"""The most chunks that queries and keys are cut into: a proof counts the pairs of each two."""


_USUAL = {
    "pattern_content",
    *(field.name for field in fields(Problem) if field.default is not MISSING),
}


_TASKS: Mapping[str, tuple[str, ...]] = {
    "tile": ("place", "direction", "reads", "writes", "area", "after"),
    "transfer": ("leg", "after"),
    "collective": ("kind", "legs", "after"),
    "merge": ("place", "sources", "after"),
    "finish": ("place", "parts", "after"),
    "delta": ("place", "out", "dout", "after"),
    "linear": ("place", "op", "reads", "writes", "rotary", "after"),
    "free": ("place", "pieces", "after"),
}
"""Fields that follow the kind of a task."""


def _read_problem(raw: object) -> Problem:
    rest = of_fields("problem", raw, _PROBLEM, _USUAL)
    for name, most in _MOST.items():
        if (rest.get(name) or 0) > most:
            raise refused(f"problem.{name}", rest[name], f"at most {most}")
    seqlen_q, seqlen_kv = rest.pop("seqlen_q"), rest.pop("seqlen_kv")
    pattern = make_pattern(rest.pop("pattern"), seqlen_q, seqlen_kv, cross=True)
    content = rest.pop("pattern_content", pattern.content)
    if content != pattern.content:
        raise refused(
            "problem.pattern_content",
            content,
            f"that of {pattern.text}, {pattern.content}; it has changed since, so plan again",
        )
    if "dtype" in rest:
        rest["dtype"] = one_of("problem.dtype", rest["dtype"], Dtype)
    if "alibi" in rest:
        rest["alibi"] = each("problem.alibi", rest["alibi"], _slope)
    return Problem(pattern=pattern, **rest)


def _table(name: str, raw: list[object]) -> tuple[range, ...]:
    if len(raw) > MOST_CHUNKS:
        raise ValueError(f"{name} has {len(raw)} chunks; it must have at most {MOST_CHUNKS}")
    return each(name, raw, _chunk)


def _slope(raw: object) -> float:
    return float(typed("slope", raw, int, float))


def _chunk(raw: object) -> range:
    start, stop, step = row("chunk", raw, ("start", "stop", "step"))
    return range(whole("start", start, 0), whole("stop", stop, 0), whole("step", step, 1))


def _place(raw: object) -> Place:
    rank, memory = row("place", raw, Place._fields)
    return Place(whole("rank", rank, 0), one_of("memory", memory, Memory))


def _piece(raw: object) -> Piece:
    tensor, chunks, heads, version = row("piece", raw, Piece._fields)
    return Piece(
        one_of("tensor", tensor, Tensor),
        wholes("chunks", chunks),
        whole("heads", heads, 1),
        typed("version", version, int),
    )


def _leg(raw: object) -> Leg:
    src, dst, pieces, version = row("leg", raw, Leg._fields)
    return Leg(
        _place(src), _place(dst), each("pieces", pieces, _piece), typed("version", version, int)
    )


def _resident(raw: object) -> Resident:
    place, piece = row("resident", raw, Resident._fields)
    return Resident(_place(place), _piece(piece))


def _read_task(raw: object) -> Task:
    kind = raw[0] if type(raw) is list and raw else raw
    if type(kind) is not str or kind not in _TASKS:
        raise refused("kind", kind, f"one of {', '.join(_TASKS)}")
    _, *rest, after = row(kind, raw, ("kind", *_TASKS[kind]))
    edges = wholes("after", after)
    match kind:
        case "transfer":
            return Transfer(_leg(rest[0]), edges)
        case "collective":
            collective, legs = rest
            return Collective(
                one_of("kind", collective, CollectiveKind), each("legs", legs, _leg), edges
            )
        case _:
            return _at_a_place(kind, rest, edges)


def _at_a_place(kind: str, rest: list[Any], edges: tuple[int, ...]) -> Task:
    place = _place(rest[0])
    match kind:
        case "tile":
            _, direction, reads, writes, area = rest
            return Tile(
                place,
                one_of("direction", direction, Direction),
                each("reads", reads, _piece),
                each("writes", writes, _piece),
                whole("area", area, 0),
                edges,
            )
        case "merge":
            return Merge(place, each("sources", rest[1], _piece), edges)
        case "finish":
            return Finish(place, each("parts", rest[1], _piece), edges)
        case "delta":
            return Delta(place, _piece(rest[1]), _piece(rest[2]), edges)
        case "linear":
            _, op, reads, writes, rotary = rest
            return Linear(
                place,
                one_of("op", op, LinearOp),
                each("reads", reads, _piece),
                each("writes", writes, _piece),
                typed("rotary", rotary, bool),
                edges,
            )
        case _:
            return Free(place, each("pieces", rest[1], _piece), edges)

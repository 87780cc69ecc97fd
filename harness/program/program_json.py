"""Device programs as JSON, written and read; every field is judged before it is used."""

from collections.abc import Mapping
from functools import partial

from harness.base.json_fields import (
    each,
    json_text,
    of_fields,
    one_of,
    parsed,
    refused,
    row,
    typed,
    whole,
    wholes,
)
from harness.plan.problem import Dtype
from harness.plan.tasks import Memory
from harness.program.operations import (
    ByteRange,
    ByteView,
    DeviceProgram,
    Group,
    Kernel,
    KernelLaunch,
    Lane,
    Operation,
    Post,
    PostEnd,
    RankProgram,
    Record,
    Wait,
)

_SCHEMA = 1
_PROGRAM: Mapping[str, tuple[type, ...]] = {
    "schema": (int,),
    "plan": (str,),
    "gpus_per_node": (int,),
    "ranks": (list,),
}
_RANK: Mapping[str, tuple[type, ...]] = {
    "rank": (int,),
    "operations": (list,),
    "arena_bytes": (dict,),
    **dict.fromkeys(("ranges", "inputs", "outputs"), (list,)),
}
_KINDS: Mapping[type, str] = {
    KernelLaunch: "launch",
    Group: "group",
    Record: "record",
    Wait: "wait",
}
_OPERATIONS: Mapping[str, tuple[str, ...]] = {
    name: kind._fields  # type: ignore[attr-defined]  # each is a NamedTuple
    for kind, name in _KINDS.items()
}
"""Fields that follow the kind of an operation."""


def program_json(program: DeviceProgram) -> str:
    """Write a program as canonical JSON (stable order, no spaces)."""
    body = {
        "schema": _SCHEMA,
        "plan": program.plan,
        "gpus_per_node": program.gpus_per_node,
        "ranks": [
            {
                "rank": rank.rank,
                "operations": [[_KINDS[type(one)], *one] for one in rank.operations],
                "arena_bytes": dict(rank.arena_bytes),
                "ranges": rank.ranges,
                "inputs": rank.inputs,
                "outputs": rank.outputs,
            }
            for rank in program.ranks
        ],
    }
    return json_text(body, compact=True, sort_keys=True)


def program_from_json(text: str) -> DeviceProgram:
    """Read what `program_json` wrote.

    Raises:
        ValueError: The text is no device program; names the field, the value and the rule.
    """
    body = of_fields("program", parsed(text), _PROGRAM, set())
    if body["schema"] != _SCHEMA:
        raise refused("schema", body["schema"], f"{_SCHEMA}; emit the program again")
    return DeviceProgram(
        body["plan"],
        whole("gpus_per_node", body["gpus_per_node"], 1),
        each("ranks", body["ranks"], _rank),
    )


def _rank(raw: object) -> RankProgram:
    body = of_fields("rank", raw, _RANK, set())
    sizes = body["arena_bytes"]
    return RankProgram(
        whole("rank", body["rank"], 0),
        each("operations", body["operations"], _operation),
        {
            one_of("memory", memory, Memory): whole("arena_bytes", size, 0)
            for memory, size in sizes.items()
        },
        each("ranges", body["ranges"], _range),
        each("inputs", body["inputs"], _placed),
        each("outputs", body["outputs"], _placed),
    )


def _operation(raw: object) -> Operation:
    kind = raw[0] if type(raw) is list and raw else raw
    if type(kind) is not str or kind not in _OPERATIONS:
        raise refused("kind", kind, f"one of {', '.join(_OPERATIONS)}")
    _, name, *rest = row(kind, raw, ("kind", *_OPERATIONS[kind]))
    lane = one_of("lane", name, Lane)
    match kind:
        case "launch":
            kernel, reads, writes, task, call = rest
            return KernelLaunch(
                lane,
                one_of("kernel", kernel, Kernel),
                each("reads", reads, _view),
                each("writes", writes, _view),
                None if task is None else whole("task", task, 0),
                None if call is None else _call(call),
            )
        case "group":
            return Group(lane, each("posts", rest[0], _post))
        case _:
            made = Record if kind == "record" else Wait
            return made(lane, whole("event", rest[0], 0))


def _call(raw: object) -> tuple[int, int]:
    number, heads = map(partial(whole, "call", least=0), row("call", raw, ("call", "heads")))
    return number, heads


def _view(raw: object) -> ByteView:
    memory, offset, shape, strides, dtype = row("view", raw, ByteView._fields)
    found = ByteView(
        one_of("memory", memory, Memory),
        whole("offset", offset, 0),
        wholes("shape", shape),
        wholes("strides", strides),
        one_of("dtype", dtype, Dtype),
    )
    if len(found.shape) != len(found.strides):
        raise refused("strides", strides, f"as many as the axes of shape {shape}")
    return found


def _post(raw: object) -> Post:
    end, peer, view = row("post", raw, Post._fields)
    return Post(one_of("end", end, PostEnd), whole("peer", peer, 0), _view(view))


def _range(raw: object) -> ByteRange:
    memory, *numbers = row("range", raw, ByteRange._fields)
    numbers = [whole("range", number, 0) for number in numbers]
    return ByteRange(one_of("memory", memory, Memory), *numbers)


def _placed(raw: object) -> tuple[int, ByteView]:
    number, view = row("resident", raw, ("number", "view"))
    return typed("number", number, int), _view(view)

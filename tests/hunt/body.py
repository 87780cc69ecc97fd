"""A plan's JSON as it is changed: where its pieces, places and legs are."""

from random import Random
from typing import Any

Body = dict[str, Any]
Piece = list[Any]  # [tensor, chunks, heads, version]
Task = list[Any]  # [kind, ..., after]

KEYED = ("k", "v", "dk", "dv", "dk_part", "dv_part")


def legs_of(task: Task) -> list[Any]:
    return [task[1]] if task[0] == "transfer" else task[2] if task[0] == "collective" else []


def groups_of(task: Task) -> list[list[Piece]]:
    """Lists of pieces in a task."""
    match task[0]:
        case "transfer" | "collective":
            return [leg[2] for leg in legs_of(task)]
        case "tile" | "linear":
            return [task[3], task[4]]
        case "delta":
            return [task[2:4]]
        case _:
            return [task[2]]


def pieces_of(task: Task) -> list[Piece]:
    return [piece for group in groups_of(task) for piece in group]


def places_of(task: Task) -> list[Any]:
    if task[0] in ("transfer", "collective"):
        return [place for leg in legs_of(task) for place in leg[:2]]
    return [task[1]]


def any_task(body: Body, rng: Random, *kinds: str) -> Task:
    return rng.choice([task for task in body["tasks"] if not kinds or task[0] in kinds])


def some_residents(body: Body, rng: Random) -> list[Any]:
    found: list[Any] = body[rng.choice(("initial", "outputs", "saved"))]
    return found


def some_piece(body: Body, rng: Random) -> Piece:
    if rng.random() < 0.15:
        found: Piece = rng.choice(some_residents(body, rng))[1]
        return found
    return rng.choice(pieces_of(any_task(body, rng)))


def table_of(body: Body, piece: Piece) -> list[Any]:
    found: list[Any] = body["kv_chunks" if piece[0] in KEYED else "q_chunks"]
    return found


def reorder(body: Body, order: list[int]) -> None:
    new = {old: at for at, old in enumerate(order)}
    body["tasks"] = [body["tasks"][old] for old in order]
    for task in body["tasks"]:
        task[-1] = [new[edge] for edge in task[-1] if edge in new]


def elsewhere(body: Body, place: list[Any], rng: Random) -> None:
    if rng.random() < 0.2:
        place[1] = "host" if place[1] == "device" else "device"
    else:
        place[0] = rng.randrange(body["problem"]["cp"] + (rng.random() < 0.1))

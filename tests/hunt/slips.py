"""Small slips in a plan: something dropped, doubled, exchanged or named wrongly."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from harness.plan.tasks import Tensor
from tests.hunt.body import (
    KEYED,
    Body,
    any_task,
    elsewhere,
    groups_of,
    legs_of,
    pieces_of,
    places_of,
    reorder,
    some_piece,
    some_residents,
    table_of,
)


def change_chunks(body: Body, rng: Random) -> None:
    piece = some_piece(body, rng)
    piece[1] = _other_chunks(piece[1], len(table_of(body, piece)), rng)


def _other_chunks(chunks: list[int], count: int, rng: Random) -> list[int]:
    chunk = rng.randrange(count + 1) if rng.random() < 0.1 else rng.randrange(count)
    at = rng.randrange(len(chunks) or 1)
    match rng.randrange(5):
        case 0:
            return [*chunks, chunk]
        case 1:
            return [*chunks[:at], *chunks[at + 1 :]]
        case 2:
            return [*chunks[:at], chunk, *chunks[at + 1 :]]
        case 3:
            return [*chunks, *chunks[at : at + 1]]
        case _:
            return rng.sample(chunks, len(chunks))


def change_heads(body: Body, rng: Random) -> None:
    piece = some_piece(body, rng)
    bit = 1 << rng.randrange(body["problem"]["heads_q"] + 1)
    piece[2] = rng.choice((piece[2] ^ bit, piece[2] | bit, bit, piece[2] << 1, piece[2] >> 1))


def change_version(body: Body, rng: Random) -> None:
    known = [piece[3] for task in body["tasks"] for piece in pieces_of(task)]
    if rng.random() < 0.3:
        rng.choice(legs_of(any_task(body, rng, "transfer", "collective")))[3] = rng.choice(known)
    else:
        some_piece(body, rng)[3] = rng.choice((*known[:40], 0, 1, -1, 9))


def change_tensor(body: Body, rng: Random) -> None:
    piece = some_piece(body, rng)
    piece[0] = rng.choice(list(Tensor)).value


def change_alike(body: Body, rng: Random) -> None:
    """One change for all pieces of a task, or all of one side of it."""
    task = any_task(body, rng)
    what = rng.choice((1, 2, 3))
    sides = rng.choice(([True], [False], [True, False]))
    pieces = [piece for piece in pieces_of(task) if (piece[0] in KEYED) in sides]
    first = rng.choice(pieces)
    if what == 1:
        value: Any = _other_chunks(first[1], len(table_of(body, first)), rng)
    else:
        value = first[what] ^ (1 << rng.randrange(4))
    for piece in pieces:
        piece[what] = value


def swap_pieces(body: Body, rng: Random) -> None:
    group = rng.choice([g for task in body["tasks"] for g in groups_of(task) if len(g) > 1])
    i, j = rng.sample(range(len(group)), 2)
    group[i], group[j] = group[j], group[i]


def swap_between(body: Body, rng: Random) -> None:
    """Exchange a field of two pieces of one tensor, anywhere."""
    first = some_piece(body, rng)
    others = [p for t in body["tasks"] for p in pieces_of(t) if p[0] == first[0] and p != first]
    second, what = rng.choice(others), rng.choice((1, 2, 3))
    first[what], second[what] = second[what], first[what]


def drop_piece(body: Body, rng: Random) -> None:
    group = rng.choice(groups_of(any_task(body, rng)))
    group.pop(rng.randrange(len(group)))


def double_piece(body: Body, rng: Random) -> None:
    group = rng.choice(groups_of(any_task(body, rng)))
    group.insert(rng.randrange(len(group) + 1), json.loads(json.dumps(rng.choice(group))))


def move_piece(body: Body, rng: Random) -> None:
    source, target = (rng.choice(groups_of(any_task(body, rng))) for _ in range(2))
    target.append(source.pop(rng.randrange(len(source))))


def change_place(body: Body, rng: Random) -> None:
    place = rng.choice(places_of(any_task(body, rng)))
    elsewhere(body, place, rng)


def swap_leg_ends(body: Body, rng: Random) -> None:
    legs = [leg for task in body["tasks"] for leg in legs_of(task)]
    first, second = rng.choice(legs), rng.choice(legs)
    end = rng.randrange(4)
    first[end], second[end] = second[end], first[end]


def change_legs(body: Body, rng: Random) -> None:
    legs = legs_of(any_task(body, rng, "collective"))
    at = rng.randrange(len(legs))
    match rng.randrange(3):
        case 0:
            legs.pop(at)
        case 1:
            legs.append(json.loads(json.dumps(legs[at])))
        case _:
            rng.shuffle(legs)


def drop_task(body: Body, rng: Random) -> None:
    at = rng.randrange(len(body["tasks"]))
    reorder(body, [i for i in range(len(body["tasks"])) if i != at])


def double_task(body: Body, rng: Random) -> None:
    tasks = body["tasks"]
    at, to = rng.randrange(len(tasks)), rng.randrange(len(tasks))
    copy = json.loads(json.dumps(tasks[at]))
    reorder(body, list(range(len(tasks))))
    body["tasks"].insert(to, copy)
    for task in body["tasks"][to + 1 :]:
        task[-1] = [edge + (edge >= to) for edge in task[-1]]


def move_task(body: Body, rng: Random) -> None:
    order = list(range(len(body["tasks"])))
    task = order.pop(rng.randrange(len(order)))
    near = max(0, task + rng.randrange(-6, 7))
    order.insert(near if rng.random() < 0.7 else rng.randrange(len(order)), task)
    reorder(body, order)


def swap_tasks(body: Body, rng: Random) -> None:
    """Exchange the contents of two tasks, but for their edges."""
    tasks = body["tasks"]
    i, j = rng.sample(range(len(tasks)), 2)
    tasks[i][:-1], tasks[j][:-1] = tasks[j][:-1], tasks[i][:-1]


def change_edges(body: Body, rng: Random) -> None:
    task = any_task(body, rng)
    match rng.randrange(4):
        case 0:
            task[-1] = []
        case 1:
            task[-1].append(rng.randrange(len(body["tasks"]) + 1))
        case _:
            task[-1].pop(rng.randrange(len(task[-1])))


def change_field(body: Body, rng: Random) -> None:
    task = any_task(body, rng)
    match task[0]:
        case "tile":
            if rng.random() < 0.5:
                task[5] = max(0, task[5] + rng.choice((-1, 1, -task[5])))
            else:
                task[2] = rng.choice(("forward", "backward"))
        case "linear":
            if rng.random() < 0.5:
                task[5] = not task[5]
            else:
                task[2] = rng.choice(("project", "output", "input_grad", "weight_grad"))
        case "collective":
            task[1] = rng.choice(("all_to_all", "all_gather", "reduce_scatter"))
        case "merge" | "finish" | "free":
            task[0] = rng.choice(("merge", "finish", "free"))
        case _:
            pass


def change_residents(body: Body, rng: Random) -> None:
    residents = some_residents(body, rng)
    at = rng.randrange(len(residents))
    match rng.randrange(4):
        case 0:
            residents.pop(at)
        case 1:
            residents.append(json.loads(json.dumps(residents[at])))
        case 2:
            elsewhere(body, residents[at][0], rng)
        case _:
            target = some_residents(body, rng)
            target.append(json.loads(json.dumps(residents[at])))


def change_table(body: Body, rng: Random) -> None:
    table = body[rng.choice(("q_chunks", "kv_chunks"))]
    at = rng.randrange(len(table))
    match rng.randrange(4):
        case 0:
            table[at][rng.randrange(3)] += rng.choice((-1, 1))
        case 1:
            other = rng.randrange(len(table))
            table[at], table[other] = table[other], table[at]
        case 2:
            table.append([0, 0, 1])
        case _:
            table.pop(at)


def change_problem(body: Body, rng: Random) -> None:
    problem = body["problem"]
    match rng.randrange(5):
        case 0:
            problem["hidden"] = 6 if problem["hidden"] is None else None
        case 1:
            problem["heads_q"], problem["heads_kv"] = rng.choice(((4, 2), (3, 1), (6, 2), (2, 2)))
        case 2:
            problem["pattern"] = rng.choice(("full", "causal", "window:left=3"))
        case 3:
            problem["cp"] = rng.randrange(1, 5)
        case _:
            body["direction"] = "forward" if body["direction"] == "backward" else "backward"


SLIPS: tuple[Callable[[Body, Random], None], ...] = (
    change_chunks,
    change_heads,
    change_version,
    change_tensor,
    change_alike,
    swap_pieces,
    swap_between,
    drop_piece,
    double_piece,
    move_piece,
    change_place,
    swap_leg_ends,
    change_legs,
    drop_task,
    double_task,
    move_task,
    swap_tasks,
    change_edges,
    change_field,
    change_residents,
    change_table,
    change_problem,
)

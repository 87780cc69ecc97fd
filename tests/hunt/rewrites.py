"""Rewrites of a plan that keep its meaning where they can be done: odd plans, but right ones."""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from random import Random

from tests.hunt.body import (
    KEYED,
    Body,
    Piece,
    Task,
    any_task,
    groups_of,
    legs_of,
    pieces_of,
    places_of,
    reorder,
    table_of,
)


def split_pieces(body: Body, rng: Random) -> None:
    """Cut pieces of a task in two, by heads or by chunks: all of them, or one."""
    task = any_task(body, rng, "transfer", "collective", "merge", "finish", "free")
    group = rng.choice(groups_of(task))
    by_heads = rng.random() < 0.5
    chosen = range(len(group)) if rng.random() < 0.7 else (rng.randrange(len(group)),)
    halves: list[list[Piece]] = [[], []]
    together = rng.random() < 0.5
    found = []
    for at, piece in enumerate(group):
        parts = list(_halves(piece, by_heads=by_heads)) if at in chosen else [piece]
        found += parts
        halves[0].append(parts[0])
        halves[1] += parts[1:]
    group[:] = found if together else halves[0] + halves[1]


def _halves(piece: Piece, *, by_heads: bool) -> Iterator[Piece]:
    tensor, chunks, heads, version = piece
    low = heads & -heads
    if by_heads and heads ^ low:
        yield [tensor, chunks, low, version]
        yield [tensor, chunks, heads ^ low, version]
    elif not by_heads and len(chunks) > 1:
        yield [tensor, chunks[:1], heads, version]
        yield [tensor, chunks[1:], heads, version]
    else:
        yield piece


def split_task(body: Body, rng: Random) -> None:
    """Do a task in two halves: by its legs, its pieces, or a tile's heads, queries or keys."""
    tasks = body["tasks"]
    at = rng.randrange(len(tasks))
    first = tasks[at]
    second = json.loads(json.dumps(first))
    match first[0]:
        case "collective":
            cut = rng.randrange(1, len(first[2]))
            first[2], second[2] = first[2][:cut], first[2][cut:]
        case "transfer":
            pieces = first[1][2]
            cut = rng.randrange(1, len(pieces))
            first[1][2], second[1][2] = pieces[:cut], pieces[cut:]
        case "merge" | "finish" | "free":
            cut = rng.randrange(1, len(first[2]))
            first[2], second[2] = first[2][:cut], first[2][cut:]
        case "tile":
            _split_tile(body, first, second, rng)
        case _:
            return
    reorder(body, list(range(len(tasks))))
    body["tasks"].insert(at + 1, second)
    for task in body["tasks"][at + 1 :]:
        task[-1] = sorted({edge + (edge > at) for edge in task[-1]} | {at})


def _split_tile(body: Body, first: Task, second: Task, rng: Random) -> None:
    side = rng.choice(("heads", "q", "k"))
    group = body["problem"]["heads_q"] // body["problem"]["heads_kv"]
    for task, half in ((first, 0), (second, 1)):
        for piece in pieces_of(task):
            keyed = piece[0] in KEYED
            if side == "heads":
                low = first[3][1][2] & -first[3][1][2] if half == 0 else 0
                if task is first and not keyed:
                    kv = low.bit_length() - 1
                    mask = ((1 << group) - 1) << (kv * group)
                    piece[2] &= mask
                elif task is first:
                    piece[2] = low
        if side in "qk":
            for piece in pieces_of(task):
                if (piece[0] in KEYED) == (side == "k"):
                    piece[1] = piece[1][1:] if half else piece[1][:1]
    if side == "heads":
        for mine, other in zip(pieces_of(second), pieces_of(first), strict=True):
            mine[2] &= ~other[2]


def together(body: Body, rng: Random) -> None:
    """Make one collective of neighbouring transfers."""
    tasks = body["tasks"]
    starts = [i for i, (a, b) in enumerate(pairwise(tasks)) if a[0] == b[0] == "transfer"]
    at = rng.choice(starts)
    count = 2
    while rng.random() < 0.6 and at + count < len(tasks) and tasks[at + count][0] == "transfer":
        count += 1
    legs = [task[1] for task in tasks[at : at + count]]
    edges = sorted({e for task in tasks[at : at + count] for e in task[-1] if e < at})
    tasks[at] = ["collective", "all_to_all", legs, edges]
    for task in tasks[at + count :]:
        task[-1] = [at if at <= e < at + count else e for e in task[-1]]
    reorder(body, [i for i in range(len(tasks)) if not at < i < at + count])


def apart(body: Body, rng: Random) -> None:
    """Make transfers of the legs of a collective."""
    tasks = body["tasks"]
    at = rng.choice([i for i, task in enumerate(tasks) if task[0] == "collective"])
    legs = tasks[at][2]
    new = [["transfer", leg, list(tasks[at][-1])] for leg in legs]
    shift = len(new) - 1
    for task in tasks[at + 1 :]:
        edges = [e + shift * (e > at) for e in task[-1]]
        task[-1] = sorted({*edges, *(range(at, at + len(new)) if at in edges else ())})
    tasks[at : at + 1] = new


def permute_chunks(body: Body, rng: Random) -> None:
    """Store the chunks of all pieces of a task in another order."""
    task = any_task(body, rng)
    seed = rng.random()
    for piece in pieces_of(task):
        piece[1] = Random(seed).sample(piece[1], len(piece[1]))


def permute_ranks(body: Body, rng: Random) -> None:
    """Exchange two ranks throughout."""
    i, j = rng.sample(range(body["problem"]["cp"]), 2)
    other = {i: j, j: i}
    places = [place for task in body["tasks"] for place in places_of(task)]
    for name in ("initial", "outputs", "saved"):
        places += [place for place, _ in body[name]]
    for place in places:
        place[0] = other.get(place[0], place[0])


def rename_version(body: Body, rng: Random) -> None:
    """Give what arrives under a version another, throughout."""
    known = sorted({p[3] for t in body["tasks"] for p in pieces_of(t)} - {0})
    old, new = rng.choice(known), rng.choice((*known, 7, -3))
    for task in body["tasks"]:
        for piece in pieces_of(task):
            piece[3] = new if piece[3] == old else piece[3]
        for leg in legs_of(task):
            leg[3] = new if leg[3] == old else leg[3]


def empty_chunk(body: Body, rng: Random) -> None:
    """Let a piece carry a chunk without tokens."""
    name, keyed = rng.choice((("q_chunks", False), ("kv_chunks", True)))
    for each in (name,) if body["problem"]["hidden"] is None else ("q_chunks", "kv_chunks"):
        body[each].append([2, 2, 1])
    task = any_task(body, rng)
    for piece in pieces_of(task):
        if (piece[0] in KEYED) == keyed:
            piece[1] = [*piece[1], len(body[name]) - 1]


def by_way_of(body: Body, rng: Random) -> None:
    """Send a leg over a third place: another rank, or the host."""
    tasks = body["tasks"]
    at = rng.choice([i for i, task in enumerate(tasks) if task[0] == "transfer"])
    src, dst, pieces, version = tasks[at][1]
    host = rng.random() < 0.4
    middle = [src[0], "host"] if host else [rng.randrange(body["problem"]["cp"]), "device"]
    way = rng.choice((version, 11))
    back = [[*piece[:3], way] for piece in pieces]
    first = ["transfer", [src, middle, pieces, way], list(tasks[at][-1])]
    legs = [[middle, src if host else dst, back, pieces[0][3] if host else version]]
    if host:
        legs.append([src, dst, pieces, version])
    new = [first] + [["transfer", leg, []] for leg in legs]
    for number, task in enumerate(new[1:], start=1):
        task[-1] = [*range(at, at + number)]
    shift = len(new) - 1
    for task in tasks[at + 1 :]:
        task[-1] = [e + shift * (e >= at) for e in task[-1]]
    tasks[at : at + 1] = new


def cut_chunks(body: Body, rng: Random) -> None:
    """Cut a chunk in two, in the table and in every piece."""
    name, keyed = rng.choice((("q_chunks", False), ("kv_chunks", True)))
    names = (name,) if body["problem"]["hidden"] is None else ("q_chunks", "kv_chunks")
    chunk = rng.choice([i for i, c in enumerate(body[name]) if len(range(*c)) > 1])
    tokens = range(*body[name][chunk])
    half = rng.randrange(1, len(tokens))
    for each in names:
        first, second = tokens[:half], tokens[half:]
        body[each][chunk] = [first.start, first.stop, first.step]
        body[each].append([second.start, second.stop, second.step])
    new = len(body[name]) - 1
    residents = [r[1] for field in ("initial", "outputs", "saved") for r in body[field]]
    for piece in [*(p for t in body["tasks"] for p in pieces_of(t)), *residents]:
        cut = len(names) > 1 or (piece[0] in KEYED) == keyed
        if cut and "w_" not in piece[0] and chunk in piece[1]:
            at = piece[1].index(chunk)
            piece[1] = [*piece[1][: at + 1], new, *piece[1][at + 1 :]]


def widen_tile(body: Body, rng: Random) -> None:
    """Let a tile name a chunk more, with which it may have nothing to do."""
    tile = any_task(body, rng, "tile")
    keyed = rng.random() < 0.5
    mine = [piece for piece in pieces_of(tile) if (piece[0] in KEYED) == keyed]
    others = [c for c in range(len(table_of(body, mine[0]))) if c not in mine[0][1]]
    chunk, at = rng.choice(others), rng.randrange(len(mine[0][1]) + 1)
    for piece in mine:
        piece[1] = [*piece[1][:at], chunk, *piece[1][at:]]


REWRITES: tuple[Callable[[Body, Random], None], ...] = (
    split_pieces,
    split_task,
    together,
    apart,
    permute_chunks,
    permute_ranks,
    rename_version,
    empty_chunk,
    by_way_of,
    cut_chunks,
    widen_tile,
)

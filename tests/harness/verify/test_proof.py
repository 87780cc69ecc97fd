"""The verifier: it accepts what is right, and every way to break a plan raises its own error."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations

import pytest

from harness.errors import (
    AbsentPieceError,
    CycleError,
    LateContributionError,
    LostResultError,
    MaskedPairError,
    MisfitError,
    MissedPairError,
    OverwriteError,
    PlanError,
    RepeatedPairError,
    UnorderedError,
)
from harness.plan.heads import span
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.tasks import (
    AccessMode,
    Collective,
    Delta,
    Finish,
    Free,
    Leg,
    Memory,
    Merge,
    Piece,
    Place,
    Resident,
    Tensor,
    Tile,
    Transfer,
    effects,
    from_rank,
    legs_of,
    ranks_of,
)
from harness.verify.pair import check_pair
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import strategy
from tests.harness.mutations import (
    changed,
    dropped,
    inserted,
    moved,
    reordered,
    with_edges,
    with_leg,
)

# strategy, pattern, (seqlen_q, seqlen_kv), (heads_q, heads_kv), cp: no shape has two equal sides.
CASES = {
    "ring": ("causal", (29, 29), (4, 2), 3),
    "ring-classic": ("full", (17, 23), (6, 3), 4),
    "zigzag": ("causal", (37, 37), (6, 2), 3),
    "stripe": ("window:left=9", (31, 31), (5, 1), 4),
    "allgather": ("causal:align=bottom_right", (19, 26), (8, 2), 3),
    "ulysses": ("causal", (27, 27), (7, 7), 3),
    "usp:2x2": ("full", (26, 33), (6, 2), 4),
    "double_ring:inner=2": ("star:blocks=5", (41, 41), (4, 1), 4),
}
PLANS = [
    pytest.param(name, direction, id=f"{name}-{direction}")
    for name in CASES
    for direction in Direction
]
every_plan = pytest.mark.parametrize(("name", "direction"), PLANS)


@cache
def case(name: str, direction: Direction) -> Plan:
    text, (seqlen_q, seqlen_kv), (heads_q, heads_kv), cp = CASES[name]
    problem = Problem(
        pattern=make_pattern(text, seqlen_q, seqlen_kv, cross=True),
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=8,
        head_dim_v=6,
        cp=cp,
    )
    plan = strategy(name).plan(problem, direction)
    verify(plan, owners_of(plan))
    return plan


@cache
def sharding_of(
    name: str, problem: Problem
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Who owns which chunks, read off the results of both directions."""
    forward, backward = (strategy(name).plan(problem, direction) for direction in Direction)

    def owned(outputs: tuple[Resident, ...], tensor: Tensor) -> tuple[tuple[int, ...], ...]:
        ranks: list[set[int]] = [set() for _ in range(problem.cp)]
        for place, piece in outputs:
            if piece.tensor is tensor:
                ranks[place.rank].update(piece.chunks)
        return tuple(tuple(sorted(chunks)) for chunks in ranks)

    return owned(forward.outputs, Tensor.OUT), owned(backward.outputs, Tensor.DK)


def owners_of(plan: Plan) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    return sharding_of(plan.strategy, plan.problem)


def breaks(plan: Plan, kind: type[PlanError], *, whole: bool = False) -> PlanError:
    """Assert that verifying raises exactly `kind` and that its message points at the place.

    `whole`: no single task is at fault.
    """
    with pytest.raises(PlanError) as caught:
        verify(plan, owners_of(plan))
    error = caught.value
    assert type(error) is kind, error
    assert error.rule in str(error)
    (note,) = error.__notes__
    assert note.splitlines()[0].startswith(plan.strategy)
    if whole:
        assert error.task is None
    else:
        assert error.task is not None
        assert error.rank in ranks_of(plan.tasks[error.task])
        assert f"rank {error.rank}, task {error.task}" in str(error)
        assert "<< ERROR" in note
    return error


def tiles(plan: Plan) -> Iterator[tuple[int, Tile]]:
    for index, task in enumerate(plan.tasks):
        if isinstance(task, Tile):
            yield index, task


def part_cells(
    plan: Plan, index: int, modes: tuple[AccessMode, ...]
) -> set[tuple[Place, Tensor, int]]:
    """Accumulators (version 0) that a task touches in these ways."""
    return {
        (place, piece.tensor, chunk)
        for place, piece, mode in effects(plan.tasks[index])
        if mode in modes and piece.tensor.is_part and not piece.version
        for chunk in piece.chunks
    }


def sent_alone(plan: Plan, index: int) -> bool:
    """Whether a transfer takes an accumulator that only this task has added to by then."""
    mine = part_cells(plan, index, (AccessMode.ACCUMULATE,))
    others: set[tuple[Place, Tensor, int]] = set()
    for other, task in enumerate(plan.tasks):
        if legs_of(task) and part_cells(plan, other, (AccessMode.TAKE,)) & mine - others:
            return True
        if other != index:
            others |= part_cells(plan, other, (AccessMode.ACCUMULATE,))
    return False


# Coverage -----------------------------------------------------------------------------------


@every_plan
def test_a_dropped_tile_is_missed(name: str, direction: Direction) -> None:
    plan = case(name, direction)
    for index, _ in tiles(plan):
        # Where its gradients leave alone, the sender then has nothing to send.
        kind = AbsentPieceError if sent_alone(plan, index) else MissedPairError
        breaks(dropped(plan, index), kind)


@every_plan
def test_a_tile_done_twice_repeats_its_pairs(name: str, direction: Direction) -> None:
    plan = case(name, direction)
    for index, tile in tiles(plan):
        error = breaks(inserted(plan, index + 1, tile, (*tile.after, index)), RepeatedPairError)
        assert error.task == index + 1


@every_plan
def test_a_tile_with_a_wrong_area_is_masked(name: str, direction: Direction) -> None:
    plan = case(name, direction)
    for index, tile in tiles(plan):
        for area in (tile.area - 1, tile.area + 1, 0):
            error = breaks(changed(plan, index, replace(tile, area=area)), MaskedPairError)
            assert error.task == index


@every_plan
def test_a_tile_over_an_empty_block_is_masked(name: str, direction: Direction) -> None:
    plan = case(name, direction)
    areas = plan.problem.pattern.areas(plan.q_chunks, plan.kv_chunks)
    empty = [(i, j) for i, row in enumerate(areas) for j, area in enumerate(row) if not area]
    assert empty or name in ("ring-classic", "stripe", "usp:2x2")  # these see all, or mix
    for index, tile in tiles(plan):
        for i, j in empty:

            def only(piece: Piece, i: int = i, j: int = j) -> Piece:
                return piece._replace(chunks=(j,) if piece.tensor.on_kv else (i,))

            masked = replace(
                tile,
                reads=tuple(map(only, tile.reads)),
                writes=tuple(map(only, tile.writes)),
                area=0,
            )
            error = breaks(inserted(plan, index, masked, tile.after), MaskedPairError)
            assert error.task == index


@every_plan
def test_an_accumulator_that_grows_after_it_left_is_late(name: str, direction: Direction) -> None:
    plan = case(name, direction)
    finished: set[tuple[Place, Tensor, int]] = set()
    for index, task in enumerate(plan.tasks):
        if isinstance(task, Finish):
            finished |= part_cells(plan, index, (AccessMode.TAKE,))
    tried = 0
    for index, task in enumerate(plan.tasks):
        taken = part_cells(plan, index, (AccessMode.TAKE,))
        adds = [i for i in range(index) if part_cells(plan, i, (AccessMode.ACCUMULATE,)) & taken]
        # Something must be there before the last contribution, or nothing could leave.
        if isinstance(task, Transfer) and len(adds) > 1 and not taken & finished:
            early = all_edges(moved(plan, index, adds[-1]))
            assert breaks(early, LateContributionError).task == adds[-1] + 1
            tried += 1
    rings = ("ring", "ring-classic", "zigzag", "stripe", "double_ring:inner=2")
    assert tried or direction is Direction.FORWARD or name not in rings


@every_plan
def test_a_tile_split_around_the_departure_of_its_gradients_is_late(
    name: str, direction: Direction
) -> None:
    plan = case(name, direction)
    for index, tile in tiles(plan):
        cells = part_cells(plan, index, (AccessMode.ACCUMULATE,))
        leaves = [
            other
            for other in range(index + 1, len(plan.tasks))
            if part_cells(plan, other, (AccessMode.TAKE,)) & cells and legs_of(plan.tasks[other])
        ]
        halves = split(plan, tile)
        if not leaves or halves is None:
            continue
        first, second = halves
        whole = reordered(
            plan,
            [
                *range(index),
                (first, tile.after),
                (second, tile.after),
                *range(index + 1, len(plan.tasks)),
            ],
        )
        whole = all_edges(whole)
        verify(whole)
        late = all_edges(moved(whole, index + 1, leaves[0] + 2))
        gone = part_cells(plan, leaves[0], (AccessMode.TAKE,))
        gone -= {
            (leg.src, piece.tensor, chunk)
            for leg in legs_of(plan.tasks[leaves[0]])
            if leg.src == leg.dst
            for piece in leg.pieces
            for chunk in piece.chunks
        }
        if gone & cells:
            breaks(late, LateContributionError)


def all_edges(plan: Plan) -> Plan:
    """Let every task wait for all before it, so that only other rules can break."""
    return replace(
        plan, tasks=tuple(replace(t, after=tuple(range(i))) for i, t in enumerate(plan.tasks))
    )


def split(plan: Plan, tile: Tile) -> tuple[Tile, Tile] | None:
    """Cut a tile into two that write the same key gradients, by query heads of one KV head."""
    low, group = tile.heads & -tile.heads, plan.problem.group
    rest = tile.heads & ~low
    if not rest or plan.problem.kv_heads(low) != plan.problem.kv_heads(tile.heads) or group == 1:
        return None

    def of(heads: int) -> Tile:
        def part(piece: Piece) -> Piece:
            kv = plan.problem.kv_heads(heads)
            return piece._replace(heads=kv if piece.tensor.on_kv else heads)

        return replace(
            tile, reads=tuple(map(part, tile.reads)), writes=tuple(map(part, tile.writes))
        )

    return of(low), of(rest)


# Presence and edges -------------------------------------------------------------------------


@every_plan
def test_two_transfers_that_swap_their_pieces_send_what_is_not_there(
    name: str, direction: Direction
) -> None:
    plan = case(name, direction)
    # Before anything has arrived, each source holds only what is its own.
    legs = [
        (index, number, leg)
        for index, task in enumerate(plan.tasks)
        if not any(legs_of(plan.tasks[edge]) for edge in task.after)
        for number, leg in enumerate(legs_of(task))
        if leg.src != leg.dst and not leg.pieces[0].tensor.is_part
    ]
    tried = 0
    for (index, number, leg), (index_2, number_2, leg_2) in combinations(legs, 2):
        tensors, tensors_2 = ([p.tensor for p in e.pieces] for e in (leg, leg_2))
        if leg.src == leg_2.src or tensors != tensors_2:
            continue
        if isinstance(plan.tasks[index], Collective) and leg.dst != leg_2.dst:
            continue
        swapped = changed(
            plan, index, with_leg(plan.tasks[index], number, leg._replace(pieces=leg_2.pieces))
        )
        swapped = changed(
            swapped,
            index_2,
            with_leg(swapped.tasks[index_2], number_2, leg_2._replace(pieces=leg.pieces)),
        )
        assert breaks(swapped, AbsentPieceError).task == index
        tried += 1
    assert tried or name == "usp:2x2"  # groups of two: no rank hears from two others


@every_plan
def test_a_missing_edge_is_unordered(name: str, direction: Direction) -> None:
    plan = case(name, direction)
    for index, task in enumerate(plan.tasks):
        for edge in task.after:
            fewer = [other for other in task.after if other != edge]
            error = breaks(with_edges(plan, index, fewer), UnorderedError)
            assert error.task == index
            assert f"no edge to task {edge}" in str(error)


@every_plan
def test_reading_before_the_arrival_reads_what_is_not_there(
    name: str, direction: Direction
) -> None:
    plan = case(name, direction)
    tried = 0
    for index, tile in tiles(plan):
        senders = [edge for edge in tile.after if legs_of(plan.tasks[edge])]
        if senders:
            early = moved(plan, index, min(senders), edges=False)
            error = breaks(early, AbsentPieceError)
            assert error.task == min(senders)
            breaks(moved(plan, index, min(senders)), CycleError)
            tried += 1
    assert tried


@every_plan
def test_an_edge_to_a_later_task_is_a_cycle(name: str, direction: Direction) -> None:
    plan = case(name, direction)
    last = len(plan.tasks) - 1
    for index in (0, last // 2, last):
        for edge in (index, last + 1, -1):
            after = (*plan.tasks[index].after, edge)
            assert breaks(with_edges(plan, index, after), CycleError).task == index


@every_plan
def test_a_piece_that_arrives_twice_overwrites(name: str, direction: Direction) -> None:
    plan = case(name, direction)
    tried = 0
    for index, task in enumerate(plan.tasks):
        if any(piece.tensor.is_part for leg in legs_of(task) for piece in leg.pieces):
            continue
        if legs_of(task):
            again = inserted(plan, index + 1, task, (*task.after, index))
            assert breaks(again, OverwriteError).task == index + 1
            tried += 1
    assert tried


@every_plan
def test_freeing_what_is_still_read_leaves_it_absent(name: str, direction: Direction) -> None:
    plan = case(name, direction)
    index, tile = list(tiles(plan))[-1]
    free = Free(tile.place, (tile.reads[1],))
    breaks(all_edges(inserted(plan, index, free)), AbsentPieceError)


# Results ------------------------------------------------------------------------------------


@every_plan
def test_a_dropped_merge_leaves_a_result_incomplete(name: str, direction: Direction) -> None:
    plan = case(name, direction)
    merges = [i for i, task in enumerate(plan.tasks) if isinstance(task, Merge)]
    for index in merges:
        breaks(dropped(plan, index), MissedPairError)
    if direction is Direction.BACKWARD and name not in ("ulysses",):
        assert merges


@every_plan
def test_a_dropped_finish_loses_its_result(name: str, direction: Direction) -> None:
    plan = case(name, direction)
    for index, task in enumerate(plan.tasks):
        if not isinstance(task, Finish):
            continue
        used = any(index in later.after for later in plan.tasks)
        error = breaks(
            dropped(plan, index), AbsentPieceError if used else LostResultError, whole=not used
        )
        if not used:
            assert error.rank == task.place.rank


@every_plan
def test_a_partial_result_that_nobody_takes_is_lost(name: str, direction: Direction) -> None:
    plan = replace(case(name, direction), saved=())
    followed = {edge for task in plan.tasks for edge in task.after}
    for index, task in enumerate(plan.tasks):
        if isinstance(task, Finish) and index not in followed:
            error = breaks(dropped(plan, index), LostResultError, whole=True)
            assert error.rank == task.place.rank
            assert "is left on device" in str(error)


@pytest.mark.parametrize("name", CASES)
def test_an_output_is_not_finished_without_its_lse(name: str) -> None:
    plan = case(name, Direction.FORWARD)
    for index, task in enumerate(plan.tasks):
        if isinstance(task, Finish):
            for parts in (task.parts[:1], task.parts[1:], task.parts[::-1]):
                error = breaks(changed(plan, index, replace(task, parts=parts)), MisfitError)
                assert "side by side" in error.rule


@pytest.mark.parametrize("name", CASES)
def test_a_key_chunk_is_named_once_in_a_tile(name: str) -> None:
    plan = case(name, Direction.FORWARD)
    for index, tile in tiles(plan):
        reads = tuple(
            piece._replace(chunks=(*piece.chunks, tile.kv[0])) if piece.tensor.on_kv else piece
            for piece in tile.reads
        )
        error = breaks(changed(plan, index, replace(tile, reads=reads)), MisfitError)
        assert "each once" in error.rule


@pytest.mark.parametrize("name", CASES)
def test_delta_joins_out_and_dout_and_nothing_else(name: str) -> None:
    plan = case(name, Direction.BACKWARD)
    at, tile = next(tiles(plan))
    q, _, _, _, dout, out = tile.reads
    verify(all_edges(inserted(plan, at, Delta(tile.place, out, dout))))
    for first, second in ((q, dout), (dout, out), (out, q), (out, out)):
        error = breaks(inserted(plan, at, Delta(tile.place, first, second)), MisfitError)
        assert error.rule == "delta joins out and dout of the same rows"


@pytest.mark.parametrize("name", CASES)
def test_ranks_exchange_what_is_on_their_devices(name: str) -> None:
    plan = case(name, Direction.FORWARD)
    for index, task in enumerate(plan.tasks):
        for number, leg in enumerate(legs_of(task)):
            if leg.src != leg.dst:
                for side in ("src", "dst"):
                    host = getattr(leg, side)._replace(memory=Memory.HOST)
                    wrong = with_leg(task, number, leg._replace(**{side: host}))
                    error = breaks(changed(plan, index, wrong), MisfitError)
                    assert error.rule == "ranks exchange what is on their devices"


@every_plan
def test_a_partial_result_may_not_be_freed(name: str, direction: Direction) -> None:
    plan = case(name, direction)
    for index, tile in tiles(plan):
        error = breaks(
            all_edges(inserted(plan, index + 1, Free(tile.place, tile.writes))), LostResultError
        )
        assert error.task == index + 1


@every_plan
def test_an_output_at_anothers_rank_is_lost(name: str, direction: Direction) -> None:
    plan = case(name, direction)
    cp = plan.problem.cp
    for at, (place, piece) in enumerate(plan.outputs):
        wrong = Resident(Place((place.rank + 1) % cp), piece)
        outputs = (*plan.outputs[:at], wrong, *plan.outputs[at + 1 :])
        error = breaks(replace(plan, outputs=outputs), LostResultError, whole=True)
        assert error.rank == wrong.place.rank
        assert "another's rank" in str(error)
        with pytest.raises(LostResultError, match="not there"):
            verify(replace(plan, outputs=outputs))


@every_plan
def test_an_output_promised_twice_or_nowhere_is_lost(name: str, direction: Direction) -> None:
    plan = case(name, direction)
    for at, output in enumerate(plan.outputs):
        rest = (*plan.outputs[:at], *plan.outputs[at + 1 :])
        twice = replace(plan, outputs=(*plan.outputs, output))
        assert "ends twice" in str(breaks(twice, LostResultError, whole=True))
        nowhere = replace(plan, outputs=rest)
        assert "ends nowhere" in str(breaks(nowhere, LostResultError, whole=True))


@every_plan
def test_a_result_that_is_given_is_not_computed(name: str, direction: Direction) -> None:
    plan = case(name, direction)
    result = plan.outputs[0]
    given = replace(plan, initial=(*plan.initial, result))
    breaks(given, LostResultError, whole=True)


# Shapes and tables --------------------------------------------------------------------------


@every_plan
def test_the_pieces_of_a_tile_fit_it(name: str, direction: Direction) -> None:
    plan = case(name, direction)
    for index, tile in tiles(plan):
        for pieces in ("reads", "writes"):
            old = getattr(tile, pieces)
            wrong = [
                (*old[:-1], old[-1]._replace(heads=old[-1].heads << 1)),
                (*old[:-1], old[-1]._replace(chunks=old[-1].chunks * 2)),
                old[:-1],
                old[::-1],
            ]
            for new in wrong:
                error = breaks(changed(plan, index, replace(tile, **{pieces: new})), MisfitError)
                assert error.task == index
        host = replace(tile, place=Place(tile.place.rank, Memory.HOST))
        breaks(changed(plan, index, host), MisfitError)
        turned = Direction.FORWARD if direction is Direction.BACKWARD else Direction.BACKWARD
        breaks(changed(plan, index, replace(tile, direction=turned)), MisfitError)


def test_out_and_lse_merge_together() -> None:
    plan = case("ring", Direction.FORWARD)
    index, tile = next(tiles(plan))
    arrived = [piece._replace(version=from_rank(1)) for piece in tile.writes]
    for sources in (arrived[:1], arrived[1:], tile.writes):
        merge = Merge(tile.place, tuple(sources))
        breaks(inserted(plan, index + 1, merge, (index,)), MisfitError)


def test_delta_joins_the_same_rows() -> None:
    plan = case("ring", Direction.BACKWARD)
    out = Piece(Tensor.OUT, (0,), plan.problem.all_heads)
    for dout in (Piece(Tensor.DOUT, (1,), out.heads), Piece(Tensor.DOUT, (0,), span(0, 1))):
        breaks(inserted(plan, 0, Delta(Place(0), out, dout)), MisfitError)


def test_a_task_on_a_rank_that_the_problem_lacks_does_not_fit() -> None:
    plan = case("ring", Direction.FORWARD)
    piece = Piece(Tensor.K, (0,), 1)
    for rank in (-1, plan.problem.cp):
        stray = Transfer(Leg(Place(0), Place(rank), (piece,)))
        with pytest.raises(MisfitError, match=f"rank {rank}"):
            verify(inserted(plan, 0, stray))


@pytest.mark.parametrize("name", ["ring", "stripe", "zigzag"])
def test_chunks_cover_the_sequence_once(name: str) -> None:
    plan = case(name, Direction.FORWARD)
    first, *rest = plan.kv_chunks
    for table, what in (
        ((first[:-1], *rest), "cover every token"),
        ((first, *rest[:-1]), "cover every token"),
        ((first, first, *rest[1:]), "disjoint"),
        ((range(-1, 3), *rest), "inside the sequence"),
        ((first[::-1], *rest), "ascend"),
    ):
        error = breaks(replace(plan, kv_chunks=tuple(table)), MisfitError, whole=True)
        assert what in str(error)


@pytest.mark.parametrize("field", ["initial", "outputs", "saved"])
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"heads": -1}, "heads of a piece"),
        ({"heads": 0}, "heads of a piece"),
        ({"heads": span(0, 99)}, "heads of a piece"),
        ({"chunks": ()}, "chunks of a piece"),
        ({"chunks": (-1,)}, "chunks of a piece"),
        ({"chunks": (99,)}, "chunks of a piece"),
        ({"chunks": (0, 0)}, "chunks of a piece"),
        ({"rank": -1}, "a rank of the plan"),
        ({"rank": 99}, "a rank of the plan"),
    ],
)
def test_what_is_there_at_the_start_and_the_end_is_a_part_of_what_there_is(
    field: str, change: dict[str, object], rule: str
) -> None:
    plan = case("zigzag", Direction.FORWARD)
    (place, piece), *others = getattr(plan, field)
    changed = dict(change)
    place = place._replace(rank=changed.pop("rank", place.rank))
    wrong = (Resident(place, piece._replace(**changed)), *others)
    error = breaks(replace(plan, **{field: wrong}), MisfitError, whole=True)
    assert rule in error.rule


# Pairs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_backward_starts_from_what_forward_left(name: str) -> None:
    forward, backward = (case(name, direction) for direction in Direction)
    check_pair(forward, backward)
    for at in range(len(forward.saved)):
        less = replace(forward, saved=(*forward.saved[:at], *forward.saved[at + 1 :]))
        with pytest.raises(AbsentPieceError):
            check_pair(less, backward)
    with pytest.raises(AbsentPieceError):
        check_pair(replace(forward, outputs=forward.outputs[1:]), backward)


def test_a_pair_is_for_one_problem() -> None:
    forward, backward = case("ring", Direction.FORWARD), case("ring", Direction.BACKWARD)
    other = replace(forward, problem=replace(forward.problem, batch=3))
    turned = replace(backward, q_chunks=backward.q_chunks[::-1])
    with pytest.raises(MisfitError, match="one problem"):
        check_pair(other, backward)
    with pytest.raises(MisfitError, match="queries alike"):
        check_pair(forward, turned)

"""Four plans written by hand: what the plan must be able to say, and what it must refuse."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.errors import (
    AbsentPieceError,
    LateContributionError,
    LostResultError,
    MisfitError,
    MissedPairError,
    PlanError,
    RepeatedPairError,
    UnorderedError,
)
from harness.plan.dependencies import linked
from harness.plan.plan import Plan, to_json
from harness.plan.reader import from_json
from harness.plan.sharding import Sharding
from harness.plan.sizes import linear_flops, piece_bytes
from harness.plan.tasks import (
    NO_CHUNKS,
    NO_HEADS,
    Finish,
    Free,
    Leg,
    Linear,
    LinearOp,
    Memory,
    Piece,
    Place,
    Resident,
    Tensor,
    Tile,
    Transfer,
    arrivals,
)
from harness.verify.pair import check_pair
from harness.verify.proof import verify
from tests.fixtures.plans import fpdt, ultraattn, uneven_ulysses, upipe
from tests.harness.mutations import changed, dropped, inserted, moved

PLANS: dict[str, tuple[Callable[[], Plan], Sharding]] = {
    "upipe-forward": (upipe.forward, upipe.SHARDING),
    "upipe-backward": (upipe.backward, upipe.SHARDING),
    "fpdt-forward": (fpdt.forward, fpdt.SHARDING),
    "fpdt-backward": (fpdt.backward, fpdt.SHARDING),
    "ultraattn-backward": (ultraattn.backward, ultraattn.SHARDING),
    "ulysses-forward": (uneven_ulysses.forward, uneven_ulysses.SHARDING),
    "ulysses-backward": (uneven_ulysses.backward, uneven_ulysses.SHARDING),
}


def breaks(plan: Plan, kind: type[PlanError]) -> PlanError:
    with pytest.raises(PlanError) as caught:
        verify(plan)
    assert type(caught.value) is kind, caught.value
    return caught.value


def relinked(plan: Plan) -> Plan:
    """The plan with all edges that readiness asks for, so that only other rules can break."""
    return replace(plan, tasks=linked(plan.initial, plan.tasks))


@pytest.mark.parametrize("name", PLANS)
def test_a_handmade_plan_is_proved_and_its_own_order_runs(name: str) -> None:
    make, sharding = PLANS[name]
    plan = make()
    verify(plan, (sharding.owned, sharding.owned))


@pytest.mark.parametrize("name", PLANS)
def test_a_handmade_plan_comes_back_from_json_and_prints(name: str) -> None:
    plan = PLANS[name][0]()
    back = from_json(to_json(plan))

    assert plan == back
    assert plan.hash == back.hash
    lines = str(plan).splitlines()
    assert lines[0].endswith(f"cp={plan.problem.cp}")
    assert {line[:4].strip() for line in lines[2:]} - {""} == set(map(str, range(plan.problem.cp)))


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        (upipe.forward, upipe.backward),
        (fpdt.forward, fpdt.backward),
        (uneven_ulysses.forward, uneven_ulysses.backward),
    ],
)
def test_handmade_backwards_start_from_what_their_forwards_left(
    forward: Callable[[], Plan], backward: Callable[[], Plan]
) -> None:
    saved, starts = forward(), backward()
    check_pair(saved, starts)
    for at in range(len(saved.saved)):
        less = replace(saved, saved=(*saved.saved[:at], *saved.saved[at + 1 :]))
        with pytest.raises(AbsentPieceError):
            check_pair(less, starts)


def test_upipe_saves_no_projection() -> None:
    saved = {piece.tensor for _, piece in upipe.forward().saved}
    assert {Tensor.X, Tensor.OUT, Tensor.LSE} == saved


@pytest.mark.parametrize("make", [upipe.forward, upipe.backward])
def test_every_product_counts_and_counts_once(make: Callable[[], Plan]) -> None:
    plan = make()
    for index, task in enumerate(plan.tasks):
        if isinstance(task, Linear) and task.writes[0].tensor.is_part:
            after = (*task.after, index)
            breaks(relinked(inserted(plan, index + 1, task, after)), RepeatedPairError)
            error = breaks(relinked(dropped(plan, index)), MissedPairError)
            assert task.writes[0].tensor.value.removesuffix("_part") in str(error)
        elif isinstance(task, Linear):
            with pytest.raises(AbsentPieceError):
                relinked(dropped(plan, index))


def test_a_layer_must_end_in_every_gradient() -> None:
    plan = upipe.backward()
    for at in range(len(plan.outputs)):
        fewer = replace(plan, outputs=(*plan.outputs[:at], *plan.outputs[at + 1 :]))
        breaks(fewer, LostResultError)


def test_a_weights_gradient_may_not_be_promised_twice_at_one_place() -> None:
    plan = upipe.backward()
    doubled = next(r for r in plan.outputs if r.piece.tensor is Tensor.DW_K_PART)
    whole = Resident(doubled.place, doubled.piece._replace(tensor=Tensor.DW_K))
    error = breaks(replace(plan, outputs=(*plan.outputs, whole)), LostResultError)
    assert "whole and in parts" in str(error)


def test_a_part_of_a_weights_gradient_is_promised_once() -> None:
    plan = upipe.backward()
    for promised in (r for r in plan.outputs if r.piece.tensor is Tensor.DW_K_PART):
        error = breaks(replace(plan, outputs=(*plan.outputs, promised)), LostResultError)
        assert "dw_k_part of chunk 0" in str(error)
        assert "ends twice" in str(error)


def test_dx_that_is_finished_early_lacks_what_comes_later() -> None:
    plan = upipe.backward()
    adds = [
        index
        for index, task in enumerate(plan.tasks)
        if isinstance(task, Linear) and task.writes[0].tensor is Tensor.DX_PART
    ]
    finish = Finish(Place(0), (Piece(Tensor.DX_PART, upipe.SHARDING.owned[0], NO_HEADS),))
    (last,) = [
        i
        for i, task in enumerate(plan.tasks)
        if isinstance(task, Finish) and task == replace(finish, after=task.after)
    ]
    early = moved(plan, last, adds[-2])
    error = breaks(relinked(early), MissedPairError)
    assert "dx of chunk 0" in str(error)
    assert "v heads" in str(error)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda task: replace(task, reads=task.reads[::-1]),
        lambda task: replace(task, op=LinearOp.OUTPUT),
        lambda task: replace(task, writes=(task.writes[0]._replace(tensor=Tensor.K),)),
        lambda task: replace(task, writes=(task.writes[0]._replace(heads=1),)),
        lambda task: replace(task, writes=(task.writes[0]._replace(chunks=(0,)),)),
        lambda task: replace(task, reads=(task.reads[0]._replace(heads=2), task.reads[1])),
        lambda task: replace(task, reads=(task.reads[0], task.reads[1]._replace(chunks=(1,)))),
        lambda task: replace(task, place=Place(task.place.rank, Memory.HOST)),
        lambda task: replace(task, rotary=False),
    ],
)
def test_a_product_whose_pieces_do_not_fit_is_refused(wrong: Callable[[Linear], Linear]) -> None:
    plan = upipe.forward()
    index, task = 0, plan.tasks[0]
    assert isinstance(task, Linear)
    breaks(changed(plan, index, wrong(task)), MisfitError)


def test_v_is_not_rotated() -> None:
    plan = upipe.forward()
    index, task = next(
        (i, t)
        for i, t in enumerate(plan.tasks)
        if isinstance(t, Linear) and t.writes[0].tensor is Tensor.V
    )
    breaks(changed(plan, index, replace(task, rotary=True)), MisfitError)


def test_a_layers_queries_and_keys_are_cut_alike() -> None:
    plan = upipe.forward()
    other = (range(1), range(1, plan.problem.seqlen_kv), range(0), range(0))
    breaks(replace(plan, kv_chunks=other), MisfitError)


@pytest.mark.parametrize("make", [fpdt.forward, fpdt.backward])
def test_what_is_released_is_gone_until_it_is_fetched(make: Callable[[], Plan]) -> None:
    plan = make()
    tried = 0
    for index, task in enumerate(plan.tasks):
        fetched = isinstance(task, Transfer) and task.leg.src.memory is Memory.HOST
        if fetched and not task.leg.pieces[0].tensor.is_part:
            with pytest.raises(AbsentPieceError):
                relinked(dropped(plan, index))
            tried += 1
    assert tried


@pytest.mark.parametrize("make", [fpdt.forward, fpdt.backward])
def test_a_release_waits_for_the_copy_to_the_host(make: Callable[[], Plan]) -> None:
    plan = make()
    for index, task in enumerate(plan.tasks):
        if isinstance(task, Free):
            readers = [
                other
                for other, reader in enumerate(plan.tasks[:index])
                if isinstance(reader, Tile)
                and reader.place == task.place
                and set(task.pieces) & set(reader.reads)
            ]
            assert set(readers[-1:]) <= set(task.after)
            for edge in task.after:
                fewer = tuple(other for other in task.after if other != edge)
                breaks(changed(plan, index, replace(task, after=fewer)), UnorderedError)


def test_a_gradient_on_the_host_must_come_back_before_it_grows() -> None:
    plan = fpdt.backward()
    index = next(
        i
        for i, task in enumerate(plan.tasks)
        if isinstance(task, Transfer)
        and task.leg.src.memory is Memory.HOST
        and task.leg.pieces[0].tensor is Tensor.DQ_PART
    )
    breaks(relinked(dropped(plan, index)), LateContributionError)


def test_a_remote_row_sends_its_gradient_home() -> None:
    plan = ultraattn.backward()
    home = next(
        i
        for i, task in enumerate(plan.tasks)
        if isinstance(task, Transfer) and task.leg.pieces[0].tensor is Tensor.DQ_PART
    )
    with pytest.raises(AbsentPieceError):
        relinked(dropped(plan, home))
    remote = [
        i
        for i, task in enumerate(plan.tasks)
        if isinstance(task, Tile) and task.q == (2,) and task.place.rank == 1
    ]
    assert len(remote) == 2
    for index in remote:
        breaks(relinked(dropped(plan, index)), MissedPairError)


def test_sizes_of_a_layer() -> None:
    plan = upipe.forward()  # float32, hidden 14, head_dim 6 and 5
    sizes = {
        Piece(Tensor.X, (0,), NO_HEADS): 2 * 14 * 4,
        Piece(Tensor.Y_PART, (1,), NO_HEADS): 3 * 14 * 4,
        Piece(Tensor.W_Q, NO_CHUNKS, 0b1011): 3 * 6 * 14 * 4,
        Piece(Tensor.W_V, NO_CHUNKS, 0b11): 2 * 5 * 14 * 4,
        Piece(Tensor.DW_O_PART, NO_CHUNKS, 0b1): 5 * 14 * 4,
        Piece(Tensor.LSE, (0, 1), 0b11): 5 * 2 * 4,
    }
    assert [len(chunk) for chunk in plan.q_chunks[:2]] == [2, 3]
    assert sizes == {piece: piece_bytes(plan, piece) for piece in sizes}

    wider = replace(plan, problem=replace(plan.problem, batch=3))
    x, w = Piece(Tensor.X, (0,), NO_HEADS), Piece(Tensor.W_Q, NO_CHUNKS, 1)
    assert 3 * piece_bytes(plan, x) == piece_bytes(wider, x)
    assert piece_bytes(plan, w) == piece_bytes(wider, w)


def test_rows_of_chunks_follow_the_order_of_their_piece() -> None:
    plan = replace(uneven_ulysses.forward(), q_chunks=(range(2), range(2, 7), range(7, 10)))
    piece = Piece(Tensor.Q, (2, 0, 1), 1)
    for _ in range(2):  # what was found is kept
        assert plan.rows(piece, (2,)) == (0, 3)
        assert plan.rows(piece, (0, 1)) == (3, 10)
        assert plan.rows(piece, (1,)) == (5, 10)
        assert plan.rows(piece._replace(chunks=(0, 1, 2)), (1,)) == (2, 7)
        with pytest.raises(ValueError, match=r"\(2, 1\) are not side by side"):
            plan.rows(piece, (2, 1))


def test_flops_of_products() -> None:
    plan = upipe.forward()
    project = plan.tasks[0]  # q of 2 heads from rank 0's tokens
    assert isinstance(project, Linear)
    tokens = upipe.SHARDING.tokens(0)
    assert 2 * tokens * 2 * 6 * 14 == linear_flops(plan, project)
    output = next(
        t for t in plan.tasks if isinstance(t, Linear) and t.writes[0].tensor is Tensor.Y_PART
    )
    assert 2 * tokens * 8 * 5 * 14 == linear_flops(plan, output)


def test_a_problem_without_a_model_width_has_no_layer() -> None:
    plan = upipe.forward()
    narrow = replace(plan, problem=replace(plan.problem, hidden=None, rotary=None))
    with pytest.raises(ValueError, match="hidden"):
        piece_bytes(narrow, Piece(Tensor.X, (0,), NO_HEADS))
    with pytest.raises(ValueError, match="hidden"):
        replace(plan.problem, hidden=0)


def test_a_part_that_moves_under_version_0_joins_no_other() -> None:
    """A move to the host and back is one accumulator, in one place at a time."""
    plan = fpdt.backward()
    leg = next(
        task.leg
        for task in plan.tasks
        if isinstance(task, Transfer) and task.leg.pieces[0].tensor is Tensor.DQ_PART
    )
    assert leg == Leg(Place(0), Place(0, Memory.HOST), leg.pieces, 0)


def test_what_arrives_together_joins_in_chunk_order_or_by_heads() -> None:
    def leg(src: int, chunk: int, heads: int) -> Leg:
        return Leg(Place(src), Place(0), (Piece(Tensor.K, (chunk,), heads),), 1)

    key = (Place(0), Tensor.K, 1)
    assert arrivals([leg(1, 5, 6), leg(2, 3, 6)]) == {key: Piece(Tensor.K, (3, 5), 6, 1)}
    assert arrivals([leg(1, 5, 1), leg(2, 5, 4)]) == {key: Piece(Tensor.K, (5,), 5, 1)}
    with pytest.raises(ValueError, match="share their heads or their chunks"):
        arrivals([leg(1, 5, 1), leg(2, 3, 4)])
    with pytest.raises(ValueError, match="some of its heads once more"):
        arrivals([leg(1, 5, 3), leg(2, 5, 6)])
    with pytest.raises(ValueError, match="a chunk of it once more"):
        arrivals([leg(1, 5, 6), leg(2, 5, 6)])

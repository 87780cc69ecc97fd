"""Plans that no strategy makes, but that are right: what is proved must run."""

import pytest

from harness.check.cell import _run
from harness.execute.shards import initial_inputs
from harness.execute.transport import LocalTransport
from harness.memory.ledger import ledger
from harness.plan.dependencies import linked
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.tasks import Finish, Piece, Place, Resident, Task, Tensor, Tile
from harness.verify.proof import verify
from patterns import make_pattern
from tests.hunt.campaign import off
from tests.hunt.provenance import verdict
from tests.hunt.truth import allowed_of, truth

CHUNKS = (range(3), range(3, 7), range(2, 2))
HERE = Place(0)
Q_SIDE = {
    Direction.FORWARD: (Tensor.Q,),
    Direction.BACKWARD: (Tensor.Q, Tensor.LSE, Tensor.DOUT, Tensor.OUT),
}
SUMS = {
    Direction.FORWARD: (Tensor.OUT_PART, Tensor.LSE_PART),
    Direction.BACKWARD: (Tensor.DQ_PART, Tensor.DK_PART, Tensor.DV_PART),
}
RESULTS = {
    Direction.FORWARD: (Tensor.OUT,),
    Direction.BACKWARD: (Tensor.DQ, Tensor.DK, Tensor.DV),
}


def piece(tensor: Tensor, q: tuple[int, ...], kv: tuple[int, ...]) -> Piece:
    return Piece(tensor, kv, 0b1) if tensor.on_kv else Piece(tensor, q, 0b11)


def plan_of(direction: Direction, tiles: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> Plan:
    """One rank that does some tiles of a causal problem, (queries, keys), in this order."""
    problem = Problem(
        pattern=make_pattern("causal", 7),
        heads_q=2,
        heads_kv=1,
        head_dim=4,
        head_dim_v=3,
        batch=2,
        dtype=Dtype.FLOAT64,
    )
    allowed = allowed_of(problem)
    tensors = (Tensor.Q, Tensor.K, Tensor.V, *Q_SIDE[direction][1:])
    every = (0, 1, 2)
    initial = tuple(Resident(HERE, piece(tensor, every, every)) for tensor in tensors)
    tasks: list[Task] = []
    for q, kv in tiles:
        rows, cols = ([at for chunk in side for at in CHUNKS[chunk]] for side in (q, kv))
        reads = tuple(piece(tensor, q, kv) for tensor in tensors)
        writes = tuple(piece(tensor, q, kv) for tensor in SUMS[direction])
        tasks.append(Tile(HERE, direction, reads, writes, int(allowed[rows][:, cols].sum())))
    tasks.append(Finish(HERE, tuple(piece(t, (0, 1), (0, 1)) for t in SUMS[direction])))
    outputs = tuple(Resident(HERE, piece(t, (0, 1), (0, 1))) for t in RESULTS[direction])
    return Plan(
        problem, "by hand", direction, CHUNKS, CHUNKS, initial, linked(initial, tasks), outputs
    )


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    "tiles",
    [
        [((1,), (0,)), ((0, 1), (1,)), ((0,), (0,))],  # queries 0 see no key of 1
        [((1,), (1,)), ((0,), (0, 1)), ((1,), (0,))],  # keys 1 are seen by no query of 0
        [((0, 1), (1,)), ((1, 0), (0,))],
    ],
)
def test_a_tile_may_name_what_it_does_not_attend(
    direction: Direction, tiles: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    plan = plan_of(direction, tiles)
    program = verify(plan)
    assert not verdict(plan)
    assert not off(program)
    inputs = initial_inputs(plan, truth(plan.problem), (0,))
    _, peaks = _run(program, inputs, LocalTransport(1), account=True)
    book = ledger(program)
    assert peaks == [*book.peak_bytes, *book.host_peak_bytes]

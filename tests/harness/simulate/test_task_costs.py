"""Seconds of single tasks, worked out by hand, and kernel calls against the lowering."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cluster.machine import Cluster, Link
from harness.cluster.presets import h100
from harness.plan.kernel_calls import lower
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.residency import Program, Slab, Step
from harness.plan.sizes import linear_flops
from harness.plan.tasks import (
    NO_HEADS,
    Delta,
    Free,
    Linear,
    LinearOp,
    Merge,
    Piece,
    Place,
    Tensor,
    Tile,
)
from harness.simulate.task_costs import TaskCosts, costs_on
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import strategy


def toy() -> Cluster:
    """Round numbers: 1 TFLOP/s, 1 TB/s, 1 us per kernel."""
    base = h100(8)
    gpu = replace(
        base.gpu,
        flops_per_s=1e12,
        efficiency_forward=1.0,
        efficiency_backward=0.5,
        efficiency_linear=0.25,
        memory_bandwidth_bytes_per_s=1e12,
        kernel_start_s=1e-6,
    )
    nvlink = Link(bandwidth_bytes_per_s=1e11, latency_s=2e-6)
    nic = Link(bandwidth_bytes_per_s=1e10, latency_s=5e-6)
    return replace(base, gpu=gpu, nvlink=nvlink, nic=nic)


def planned(
    name: str,
    pattern: str = "full",
    seqlen: int = 2048,
    cp: int = 2,
    heads: int = 1,
    **more: object,
) -> Program:
    direction = more.pop("direction", Direction.FORWARD)
    assert isinstance(direction, Direction)
    problem = Problem(
        pattern=make_pattern(pattern, seqlen),
        heads_q=heads,
        heads_kv=heads,
        head_dim=64,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )
    return verify(strategy(name).plan(problem, direction))


def tiles(program: Program) -> list[int]:
    return [i for i, task in enumerate(program.plan.tasks) if isinstance(task, Tile)]


def alone(*tasks: object) -> TaskCosts:
    """The costs of tasks in a plan without anything else: 16 query and key tokens, hidden 32."""
    problem = Problem(
        pattern=make_pattern("full", 16),
        heads_q=4,
        heads_kv=2,
        head_dim=8,
        head_dim_v=4,
        dtype=Dtype.BFLOAT16,
        hidden=32,
    )
    plan = Plan(problem, "", Direction.FORWARD, (range(16),), (range(16),), (), tasks, ())
    steps = tuple(Step(set(), [], []) for _ in tasks)
    return costs_on(Program(plan, (), steps, frozenset(), 0, {}), toy())


def test_a_first_tile_takes_its_flops_and_one_kernel_start() -> None:
    program = planned("ring")
    first, second = tiles(program)[0], tiles(program)[2]
    costs = costs_on(program, toy())

    # 1024 x 1024 pairs x 4 x 64 flops at 1 TFLOP/s, and 1 us to start.
    assert costs.compute_s(first) == pytest.approx(1e-6 + 268.435456e-6, rel=1e-12)
    # The second folds out (1024 x 64 x 4 bytes) and lse (1024 x 4 bytes) in, three passes.
    assert costs.compute_s(second) == pytest.approx(269.435456e-6 + 3 * 266240e-12, rel=1e-12)


def test_a_backward_tile_takes_two_and_a_half_times_the_flops() -> None:
    program = planned("ring", direction=Direction.BACKWARD)
    first = costs_on(program, toy()).compute_s(tiles(program)[0])

    # 2.5 x 268.435456 us at half the peak.
    assert first == pytest.approx(1e-6 + 5 * 268.435456e-6, rel=1e-12)


def test_a_tile_that_moves_more_than_it_computes_is_bound_by_memory() -> None:
    program = planned("ring", seqlen=4)
    first = costs_on(program, toy()).compute_s(tiles(program)[0])

    # q, k, v: 2 tokens x 64 x 2 bytes each; out: 2 x 64 x 4; lse: 2 x 4. Flops: 4 x 256, less.
    assert first == pytest.approx(1e-6 + (3 * 256 + 512 + 8) * 1e-12, rel=1e-12)


def test_a_merge_reads_two_and_writes_one() -> None:
    source = Piece(Tensor.DK_PART, (0,), 0b11, 2)
    # 16 tokens x 2 heads x 8 x 4 bytes, three times.
    assert alone(Merge(Place(0), (source,))).compute_s(0) == pytest.approx(
        1e-6 + 3 * 1024e-12, rel=1e-12
    )


def test_a_merge_that_begins_an_accumulator_moves_it_twice_only() -> None:
    source = Piece(Tensor.DK_PART, (0,), 0b11, 2)
    costs = alone(Merge(Place(0), (source,)))
    slab = Slab(0, Place(0), source._replace(version=0))
    step = Step(set(), [], [0])
    costs = costs_on(replace(costs.program, slabs=(slab,), steps=(step,)), toy())

    assert costs.compute_s(0) == pytest.approx(1e-6 + 2 * 1024e-12, rel=1e-12)


def test_delta_reads_two_and_writes_one() -> None:
    out, dout = (Piece(tensor, (0,), 0b1111) for tensor in (Tensor.OUT, Tensor.DOUT))
    # 16 tokens x 4 heads: out and dout 4 wide in 2 bytes, delta 1 wide in 4 bytes.
    assert alone(Delta(Place(0), out, dout)).compute_s(0) == pytest.approx(
        1e-6 + 64 * (8 + 8 + 4) * 1e-12, rel=1e-12
    )


def test_finishing_reads_parts_and_writes_results() -> None:
    program = planned("ring")
    last = len(program.plan.tasks) - 1

    # 1024 tokens: out 64 x 4 bytes becomes 64 x 2, lse 4 bytes stays 4.
    assert costs_on(program, toy()).compute_s(last) == pytest.approx(
        1e-6 + 1024 * (256 + 128 + 8) * 1e-12, rel=1e-12
    )


X, WEIGHT = Piece(Tensor.X, (0,), NO_HEADS), (0,)


@pytest.mark.parametrize(
    ("op", "reads", "write", "elements"),
    [
        (LinearOp.PROJECT, (X, Piece(Tensor.W_Q, WEIGHT, 0b111)), Tensor.Q, 3 * 8),
        (LinearOp.PROJECT, (X, Piece(Tensor.W_V, WEIGHT, 0b1)), Tensor.V, 1 * 4),
        (
            LinearOp.OUTPUT,
            (Piece(Tensor.OUT, (0,), 0b11), Piece(Tensor.W_O, WEIGHT, 0b11)),
            Tensor.Y_PART,
            2 * 4,
        ),
        (LinearOp.WEIGHT_GRAD, (X, Piece(Tensor.DK, (0,), 0b11)), Tensor.DW_K_PART, 2 * 8),
    ],
)
def test_a_projection_takes_two_flops_per_token_head_width_and_hidden_unit(
    op: LinearOp, reads: tuple[Piece, ...], write: Tensor, elements: int
) -> None:
    heads = NO_HEADS if write.is_headless else max(piece.heads for piece in reads)
    task = Linear(Place(0), op, reads, (Piece(write, (0,), heads),))
    costs = alone(task)

    assert linear_flops(costs.plan, task) == 2 * 16 * elements * 32
    assert costs.compute_s(0) == pytest.approx(1e-6 + 2 * 16 * elements * 32 / 0.25e12, rel=1e-12)


def test_freeing_costs_nothing_and_is_not_launched() -> None:
    costs = alone(Free(Place(0), ()))

    assert (costs.compute_s(0), costs.launches(0)) == (0.0, 0)


def test_legs_take_their_links_latency_and_bandwidth() -> None:
    program = planned("ring", cp=16, seqlen=16 * 64)
    costs = costs_on(program, toy())
    # k and v of 64 tokens x 64 x 2 bytes; ranks 7 and 8 are on two nodes.
    size = 2 * 64 * 64 * 2
    for task in program.plan.tasks[:16]:
        across = task.leg.src.rank in (7, 15)
        expected = 5e-6 + size / 1e10 if across else 2e-6 + size / 1e11
        assert costs.leg_s(task.leg) == pytest.approx(expected, rel=1e-12)


def test_a_collective_pays_the_slowest_latency_once_and_copies_locally() -> None:
    program = planned("ulysses", cp=16, heads=16, seqlen=1024)
    costs = costs_on(program, toy())
    task = program.plan.tasks[0]
    by_pair = {(leg.src.rank, leg.dst.rank): costs.collective_leg_s(leg) for leg in task.legs}
    size = 64 * 64 * 2

    assert costs.collective_start_s(task) == 5e-6
    assert by_pair[0, 1] == pytest.approx(size / 1e11, rel=1e-12)
    assert by_pair[0, 8] == pytest.approx(size / 1e10, rel=1e-12)
    assert by_pair[0, 0] == pytest.approx(2 * size / 1e12, rel=1e-12)  # read and written


@pytest.mark.parametrize(
    "name", ["ring", "zigzag", "stripe", "ulysses", "usp:2x4", "usp:4x2", "double_ring"]
)
@pytest.mark.parametrize("pattern", ["full", "causal", "documents:lengths=512+512"])
def test_kernel_calls_are_those_of_the_lowering(name: str, pattern: str) -> None:
    program = planned(name, pattern, seqlen=1024, cp=8, heads=8)
    costs = costs_on(program, toy())
    one_mask_each = pattern != "documents:lengths=512+512"
    for index in tiles(program):
        tile = program.plan.tasks[index]
        assert isinstance(tile, Tile)
        chunks = (program.plan.chunks(piece) for piece in tile.reads[:2])
        lowered = len(lower(program.plan.problem.pattern, *chunks))
        if one_mask_each:
            assert costs.kernel_calls(tile) == lowered
        else:
            assert costs.kernel_calls(tile) <= lowered


@pytest.mark.parametrize(
    ("pattern", "lowered"), [("window:left=64", 1), ("documents:lengths=700+300+1048", 3)]
)
def test_any_mask_is_one_kernel_call_however_the_cpu_cuts_it(pattern: str, lowered: int) -> None:
    program = planned("ulysses", pattern, seqlen=2048, heads=2)
    index = tiles(program)[0]
    tile = program.plan.tasks[index]
    assert isinstance(tile, Tile)
    chunks = tuple(program.plan.chunks(piece) for piece in tile.reads[:2])

    assert len(lower(program.plan.problem.pattern, *chunks)) == lowered
    assert costs_on(program, toy()).kernel_calls(tile) == 1


def test_a_staircase_is_one_kernel_call() -> None:
    """A rank's own zigzag pair: two triangles and the rectangle between them."""
    program = planned("zigzag", "causal", seqlen=1024, cp=4)
    home = program.plan.tasks[tiles(program)[0]]
    assert isinstance(home, Tile)

    assert home.q == home.kv == (0, 7)
    assert costs_on(program, toy()).kernel_calls(home) == 1


def test_two_diagonals_are_two_kernel_calls() -> None:
    """Gathered keys against a zigzag pair, as Llama 3 calls its kernel."""
    program = planned("allgather:placement=zigzag", "causal", seqlen=1024, cp=4)
    own = program.plan.tasks[tiles(program)[1]]
    assert isinstance(own, Tile)

    assert own.q == (1, 6)
    assert costs_on(program, toy()).kernel_calls(own) == 2


def causal_tile(q: tuple[int, ...], kv: tuple[int, ...], chunks: tuple[range, ...]) -> TaskCosts:
    pattern = make_pattern("causal", 64)
    problem = Problem(pattern=pattern, heads_q=1, heads_kv=1, head_dim=8, dtype=Dtype.BFLOAT16)
    area = sum(pattern.area(chunks[i], chunks[j]) for i in q for j in kv)
    reads = (Piece(Tensor.Q, q, 1), Piece(Tensor.K, kv, 1), Piece(Tensor.V, kv, 1))
    tile = Tile(Place(0), Direction.FORWARD, reads, (), area)
    plan = Plan(problem, "", Direction.FORWARD, chunks, chunks, (), (tile,), ())
    return costs_on(Program(plan, (), (Step(set(), [], []),), frozenset(), 0, {}), toy())


EIGHTS = tuple(range(8 * i, 8 * i + 8) for i in range(8))
STRIPES = (range(0, 16, 2), range(16, 32, 2), range(1, 16, 2), range(17, 32, 2))


@pytest.mark.parametrize(
    ("q", "kv", "chunks", "calls"),
    [
        ((2, 5), (0, 5), EIGHTS, 2),  # one tall rectangle, one triangle
        ((0, 4), (0, 2, 4), EIGHTS, 3),  # two triangles that are no staircase, a rectangle
        ((0, 4), (0, 4), EIGHTS, 1),  # a staircase
        ((2, 4), (0, 2, 4), EIGHTS, 2),  # a staircase, and a rectangle left of it
    ],
)
def test_kernel_calls_by_hand(
    q: tuple[int, ...], kv: tuple[int, ...], chunks: tuple[range, ...], calls: int
) -> None:
    costs = causal_tile(q, kv, chunks)
    lowered = lower(
        costs.plan.problem.pattern, tuple(chunks[c] for c in q), tuple(chunks[c] for c in kv)
    )

    assert costs.launches(0) == calls == len(lowered)


def test_halves_of_a_stripe_are_one_operand() -> None:
    """Else the queries of the second half would take a rectangle and a triangle."""
    assert causal_tile((1,), (0, 1), STRIPES).launches(0) == 1


subsets = st.sets(st.integers(0, 7), min_size=1).map(lambda chosen: tuple(sorted(chosen)))


@given(subsets, subsets)
def test_kernel_calls_are_never_more_than_the_lowering_makes(
    q: tuple[int, ...], kv: tuple[int, ...]
) -> None:
    needed = tuple(i for i in q if i >= kv[0])
    if needed:
        costs = causal_tile(needed, kv, EIGHTS)
        runs = (tuple(EIGHTS[c] for c in chunks) for chunks in (needed, kv))
        assert costs.launches(0) <= len(lower(costs.plan.problem.pattern, *runs))

"""Strategies whose rings carry something else than all keys one way round."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.errors import UnsupportedError
from harness.explain.volumes import received_bytes
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.tasks import Collective, Tensor, Transfer, legs_of
from harness.planning.strategy import Context
from harness.prepare.scalable_plan import searches
from harness.records.config import Config
from patterns import make_pattern
from strategies import strategy
from strategies.tasp import disjoint_rings

FORWARD, BACKWARD = Direction
WIDE = Problem(  # a width at which two numbers a row hardly count
    pattern=make_pattern("full", 56),
    heads_q=5,
    heads_kv=5,
    head_dim=128,
    batch=2,
    dtype=Dtype.BFLOAT16,
    cp=7,
)


def bytes_of(text: str, problem: Problem, direction: Direction = FORWARD) -> int:
    return max(received_bytes(strategy(text).plan(problem, direction)))


def moves(plan: Plan, tensor: Tensor) -> list[tuple[int, int]]:
    """(source, destination) of each leg that carries a tensor."""
    return [
        (leg.src.rank, leg.dst.rank)
        for task in plan.tasks
        for leg in legs_of(task)
        if any(piece.tensor is tensor for piece in leg.pieces)
    ]


def test_queries_backward_are_a_quarter_fewer_bytes_than_keys() -> None:
    """BurstAttention: q, dout and dq against k, v, dk and dv; lse and delta are 8 bytes a row."""
    sent = {
        way: bytes_of(f"ring-q:backward={way},round_sent=true", WIDE, BACKWARD)
        for way in ("queries", "keys")
    }

    assert sent["queries"] / sent["keys"] == (6 * 128 + 8) / (8 * 128)


@pytest.mark.parametrize(("heads_kv", "travels"), [(5, "queries"), (1, "keys")])
def test_what_is_fewer_bytes_travels_backward(heads_kv: int, travels: str) -> None:
    problem = replace(WIDE, heads_kv=heads_kv)
    resolved = strategy("ring-q").resolved(problem, BACKWARD)
    other = {"queries": "keys", "keys": "queries"}[travels]

    assert resolved.text == f"ring-q:backward={travels}"
    assert bytes_of("ring-q", problem, BACKWARD) == bytes_of(resolved.text, problem, BACKWARD)
    assert bytes_of("ring-q", problem, BACKWARD) < bytes_of(
        f"ring-q:backward={other}", problem, BACKWARD
    )


def carried(
    text: str, problem: Problem, evaluate: Callable[[Plan], float] | None = None
) -> set[str]:
    plan = strategy(text).plan(problem, FORWARD, Context(evaluate=evaluate))
    return {tensor.value for tensor in (Tensor.Q, Tensor.K) if moves(plan, tensor)}


def test_without_a_prediction_what_is_fewer_bytes_travels_forward() -> None:
    """Meta, arXiv:2411.01783: queries where new tokens are few beside those that are cached."""
    few = replace(WIDE, pattern=make_pattern("causal:align=bottom_right", 15, 90, cross=True))
    assert carried("ring-q:carry=auto", few) == {"q"}
    more = replace(few, pattern=make_pattern("causal:align=bottom_right", 65, 90, cross=True))
    assert carried("ring-q:carry=auto", more) == {"k"}  # 65 x 772 bytes against 90 x 512
    shared = replace(WIDE, heads_kv=1)
    assert carried("ring-q:carry=auto", shared) == {"k"}
    assert bytes_of("ring-q:carry=auto", shared) == bytes_of("ring-q:carry=keys", shared)
    assert strategy("ring-q:carry=auto").resolved(shared, FORWARD).text == (
        "ring-q:carry=keys,backward=keys"
    )


@pytest.mark.parametrize(("slow", "travels"), [(Tensor.K, "q"), (Tensor.Q, "k")])
def test_what_is_predicted_to_be_faster_travels(slow: Tensor, travels: str) -> None:
    seen = []

    def seconds(plan: Plan) -> float:
        seen.append(plan)
        return 2.0 if moves(plan, slow) else 1.0

    assert carried("ring-q:carry=auto", WIDE, seconds) == {travels}
    assert len(seen) == 2  # each once, however often the choice is asked for
    backward = strategy("ring-q:carry=auto").resolved(WIDE, BACKWARD, Context(evaluate=seconds))
    assert backward.text == f"ring-q:backward={'queries' if travels == 'q' else 'keys'}"
    given = strategy("ring-q:carry=auto,backward=keys")
    assert given.resolved(WIDE, BACKWARD, Context(evaluate=seconds)).options.backward == "keys"


def test_a_plan_that_is_chosen_by_time_belongs_to_a_cluster() -> None:
    config = Config(
        strategy="ring-q:carry=auto",
        pattern="full",
        cp=7,
        seqlen_q=56,
        seqlen_kv=56,
        heads_q=5,
        heads_kv=5,
        head_dim=128,
    )
    assert searches(config)
    assert not searches(replace(config, strategy="ring-q"))


def test_queries_travel_one_way_and_outputs_come_home_the_other() -> None:
    plan = strategy("ring-q:home=ring").plan(WIDE, FORWARD)

    assert {(dst - src) % 7 for src, dst in moves(plan, Tensor.Q)} == {1}
    back = [(src - dst) % 7 for src, dst in moves(plan, Tensor.OUT_PART)]
    assert back == [step for step in range(1, 7) for _ in range(7)]
    assert all(isinstance(task, Transfer) for task in plan.tasks if legs_of(task))
    assert not moves(plan, Tensor.K)


def test_outputs_come_home_in_one_all_to_all() -> None:
    plan = strategy("ring-q").plan(WIDE, FORWARD)
    together = [task for task in plan.tasks if isinstance(task, Collective)]

    assert [len(task.legs) for task in together] == [7 * 6]
    assert len(moves(plan, Tensor.OUT_PART)) == 7 * 6


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 31, 32])
def test_rings_share_no_link(ranks: int) -> None:
    rings = disjoint_rings(ranks)
    links = [(ring[i - 1], ring[i]) for ring in rings for i in range(ranks)]

    assert all(sorted(ring) == list(range(ranks)) for ring in rings)
    assert len(set(links)) == len(links)
    assert len(rings) == {1: 1, 4: 2, 6: 4}.get(ranks, ranks - 1)


def test_at_every_step_a_part_goes_over_every_link() -> None:
    plan = strategy("tasp:placement=contiguous").plan(WIDE, FORWARD)

    links = {(src, dst) for src in range(7) for dst in range(7) if src != dst}
    sent = moves(plan, Tensor.K)
    assert [set(sent[i : i + 42]) for i in range(0, len(sent), 42)] == [links] * 6


def test_too_many_parts_are_refused_with_what_fits() -> None:
    problem = replace(WIDE, cp=64)
    looked_for = disjoint_rings.cache_info().misses
    fits = r"62 parts .* 128 chunks .* 4096 .*try tasp:placement=contiguous"
    with pytest.raises(UnsupportedError, match=fits):
        strategy("tasp").plan(problem, FORWARD)
    assert disjoint_rings.cache_info().misses == looked_for  # that takes a second
    strategy("tasp:placement=contiguous").plan(replace(problem, cp=41), FORWARD)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("rows", [1, 2, 3, 6])
def test_a_mesh_moves_the_bytes_of_its_tiles(rows: int, direction: Direction) -> None:
    """X - 1 rows and Y - 1 columns come to a rank, and as many partial results come home."""
    problem = replace(WIDE, pattern=make_pattern("full", 54), cp=6, heads_q=6, heads_kv=2)
    tokens, forward = 2 * 54 // 6, direction is FORWARD
    row = 6 * (128 * 2 + 129 * 4 if forward else 256 * 2 + 8 + 128 * 4)
    column = 2 * 256 * (2 if forward else 6)

    assert (
        received_bytes(strategy(f"mesh:rows={rows}").plan(problem, direction))
        == (tokens * ((6 // rows - 1) * row + (rows - 1) * column),) * 6
    )


def test_a_mesh_passes_chunks_between_neighbours_alone() -> None:
    plan = strategy("mesh:rows=2").plan(replace(WIDE, cp=6), FORWARD)

    along = {(dst // 3 - src // 3, (src - dst) % 3) for src, dst in moves(plan, Tensor.Q)}
    assert along == {(0, 1)}
    assert {abs(src - dst) for src, dst in moves(plan, Tensor.K)} == {3}


def test_a_mesh_that_does_not_divide_is_refused_with_what_does() -> None:
    with pytest.raises(UnsupportedError, match=r"mesh: rows \(4\) must .*try mesh:rows=1"):
        strategy("mesh:rows=4").plan(replace(WIDE, cp=6), FORWARD)

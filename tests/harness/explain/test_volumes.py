"""A plan's bytes against the closed forms of the papers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.explain.volumes import received_bytes
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.tasks import Leg, Memory, Transfer
from patterns import make_pattern
from strategies import STRATEGIES, strategy

MIB = 2**20
SPELLED = (
    "ring",
    "ring:direction=both",
    "ring:direction=both,prune=false",
    "ring-q:backward=keys",
    "ring-q:backward=queries",
    "ring-q:backward=queries,prune=false",
    "ring-q:backward=queries,home=ring,round_sent=true",
    "tasp",
    "tasp:prune=false,placement=contiguous",
    "ring-classic",
    "zigzag",
    "zigzag:prune=false",
    "stripe",
    "stripe:prune=false",
    "double_ring:inner=2",
    "double_ring:inner=2,prune=false",
    "allgather",
    "allgather:prune=false,placement=zigzag",
    "ulysses",
    "ulysses:prune=false",
    "usp",
    "usp:2x2",
    "usp:2x2,prune=false",
    "usp:2x2,ring_inside=true",
    "usp:4x2,placement=contiguous",
)


def problem(
    *,
    cp: int,
    heads_q: int = 8,
    heads_kv: int = 8,
    seqlen: int = 64,
    seqlen_kv: int = 128,
    pattern: str = "full",
    dtype: Dtype = Dtype.BFLOAT16,
) -> Problem:
    return Problem(
        pattern=make_pattern(pattern, seqlen, seqlen_kv, cross=True),
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=6,
        head_dim_v=10,
        batch=2,
        dtype=dtype,
        cp=cp,
    )


def by_formula(text: str, asked: Problem, direction: Direction) -> tuple[int, ...] | None:
    form = strategy(text).volume(asked, direction)
    return None if form is None else form.received_bytes


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("text", SPELLED)
@given(
    cp=st.sampled_from((2, 4, 8)),
    heads=st.sampled_from(((8, 8), (8, 2), (8, 1), (24, 8), (16, 4), (40, 8))),
    dtype=st.sampled_from(Dtype),
)
def test_every_rank_receives_what_the_closed_form_says(
    text: str, direction: Direction, cp: int, heads: tuple[int, int], dtype: Dtype
) -> None:
    if text.startswith("usp:4x2"):
        cp = 8
    elif text.startswith("usp:2x2"):
        cp = 4
    asked = problem(cp=cp, heads_q=heads[0], heads_kv=heads[1], dtype=dtype)
    plan = strategy(text).plan(asked, direction)

    assert by_formula(text, asked, direction) == received_bytes(plan)


def test_every_strategy_of_the_mesh_family_has_a_closed_form() -> None:
    asked = problem(cp=4)
    known = {name for name in STRATEGIES if by_formula(name, asked, Direction.FORWARD) is not None}

    assert {text.partition(":")[0] for text in SPELLED} <= known


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        pytest.param("ring", problem(cp=4, pattern="causal"), id="pattern"),
        pytest.param("ring", problem(cp=4, seqlen=66), id="queries"),
        pytest.param("ring", problem(cp=4, seqlen_kv=132), id="keys"),
        pytest.param("ulysses", problem(cp=4, heads_q=6, heads_kv=6), id="heads"),
    ],
)
def test_no_closed_form_is_claimed_outside_its_range(text: str, asked: Problem) -> None:
    assert by_formula(text, asked, Direction.FORWARD) is None


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("text", ["usp:3x2", "usp:3x2,ring_inside=true"])
def test_ranks_whose_heads_cut_across_kv_groups_receive_more(
    text: str, direction: Direction
) -> None:
    """12 query heads in groups of 6, cut in three: the middle ranks hold both KV heads."""
    asked = problem(cp=6, heads_q=12, heads_kv=2, seqlen=48, seqlen_kv=96)
    received = received_bytes(strategy(text).plan(asked, direction))

    assert len(set(received)) > 1
    assert by_formula(text, asked, direction) == received


def test_what_a_rank_moves_to_its_own_host_memory_is_not_received() -> None:
    plan = strategy("ring").plan(problem(cp=2), Direction.FORWARD)
    place, piece = plan.initial[0]
    offload = Transfer(Leg(place, place._replace(memory=Memory.HOST), (piece,)))

    assert received_bytes(replace(plan, tasks=(offload,))) == (0, 0)


def test_one_rank_receives_nothing() -> None:
    asked = problem(cp=1)
    for text in ("ring-classic", "zigzag", "allgather", "ulysses", "usp"):
        for direction in Direction:
            assert by_formula(text, asked, direction) == (0,)
            assert received_bytes(strategy(text).plan(asked, direction)) == (0,)


def test_a_copied_kv_head_costs_ulysses_what_a_kv_head_per_rank_would() -> None:
    """One KV head on each of 8 ranks moves the same forward, whether it is one of 2 or one of 8."""
    few, many = (problem(cp=8, heads_q=16, heads_kv=n) for n in (2, 8))
    volumes = [by_formula("ulysses", asked, Direction.FORWARD) for asked in (few, many)]

    assert volumes[0] == volumes[1]


@pytest.mark.parametrize(
    ("text", "heads_kv", "mib"),
    [("ring", 32, 1792), ("ring", 8, 448), ("ulysses", 32, 448), ("ulysses", 8, 280)],
)
def test_the_worked_example_of_128k_tokens_on_8_ranks(text: str, heads_kv: int, mib: int) -> None:
    """V_ring = 2 s h_kv (cp-1)/cp and V_ulysses = s/cp (2h + 2h_kv) (cp-1)/cp elements."""
    s, cp, h, h_kv = 131072, 8, 32 * 128, heads_kv * 128
    elements = {
        "ring": 2 * s * h_kv * (cp - 1) // cp,
        "ulysses": s // cp * (2 * h + 2 * h_kv) * (cp - 1) // cp,
    }
    asked = Problem(
        pattern=make_pattern("full", s),
        heads_q=32,
        heads_kv=heads_kv,
        head_dim=128,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )
    plan = strategy(text).plan(asked, Direction.FORWARD)

    assert mib * MIB == 2 * elements[text]
    assert (mib * MIB,) * cp == by_formula(text, asked, Direction.FORWARD)
    assert (mib * MIB,) * cp == received_bytes(plan)

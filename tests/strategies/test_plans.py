"""Every strategy in the table: its plans are proved, pair up, move what the paper says, and print.

`.venv/bin/python tests/strategies/test_plans.py` writes the golden grids anew.
"""

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UnsupportedError
from harness.plan.plan import Plan, to_json
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.reader import from_json
from harness.plan.sharding import Sharding, contiguous, stripe, subdivided, zigzag
from harness.plan.sizes import leg_bytes
from harness.plan.tasks import Tensor, legs_of
from harness.planning.builder import balanced_heads
from harness.planning.strategy import Context
from harness.verify.pair import check_pair
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import DIRECT, STRATEGIES, strategy, usp
from tests.patterns.generators import CROSS_TEXTS

GOLDEN = Path(__file__).parents[1] / "golden"
DRAWN = ("ring,direction=both", "ring-q,home=ring", "mesh,rows=2")
"""Options whose grid is drawn too."""
HEADS = ((6, 2), (7, 7), (5, 1), (12, 4))
# Who owns what, from the papers. Of others the owners are those that hold q and k to begin with.
PLACEMENTS = {
    **dict.fromkeys(("ring", "ring-classic", "allgather", "ulysses", "owner", "grid"), contiguous),
    **dict.fromkeys(("zigzag", "double_ring", "ring-q"), zigzag),
    **dict.fromkeys(("stripe", "mesh"), stripe),
}
# Those that search are slow to draw many problems for; they have tests of their own.
RULES = [name for name in STRATEGIES if name in DIRECT]
every_strategy = pytest.mark.parametrize("name", RULES)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any pattern, odd and tiny lengths, fewer tokens than ranks, cross lengths."""
    cp = draw(st.integers(1, 9))
    heads_q, heads_kv = draw(st.sampled_from(HEADS))
    lengths = st.sampled_from((1, 5)) | st.integers(1, 40)
    if draw(st.integers(0, 3)) == 0:
        parts = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
        text = f"documents:lengths={'+'.join(map(str, parts))}"
        seqlen_q = seqlen_kv = sum(parts)
    else:
        text = draw(st.sampled_from(CROSS_TEXTS))
        seqlen_q = draw(lengths)
        seqlen_kv = draw(st.just(seqlen_q) | lengths)
    return Problem(
        pattern=make_pattern(text, seqlen_q, seqlen_kv, cross=True),
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=draw(st.sampled_from((8, 12))),
        head_dim_v=6,
        batch=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from(Dtype)),
        cp=cp,
    )


def sharding(name: str, problem: Problem, seqlen: int) -> Sharding:
    """Who owns what, from the definition of each strategy's placement."""
    if name == "usp":
        ulysses, ring = usp.degrees(problem, usp.Options(), Context())
        return subdivided(zigzag(seqlen, ring), ulysses)
    return PLACEMENTS[name](seqlen, problem.cp)


Owners = tuple[tuple[tuple[int, ...], ...], ...]


def owners(name: str, problem: Problem, forward: Plan) -> Owners:
    """Per rank, the query chunks and the key chunks that it owns."""
    if name in PLACEMENTS or name == "usp":
        tables = (forward.q_chunks, problem.seqlen_q), (forward.kv_chunks, problem.seqlen_kv)
        return tuple(_parts_of(sharding(name, problem, length), table) for table, length in tables)
    held = {
        tensor: [
            [
                c
                for place, piece in forward.initial
                for c in piece.chunks
                if piece.tensor is tensor and place.rank == rank
            ]
            for rank in range(problem.cp)
        ]
        for tensor in (Tensor.Q, Tensor.K)
    }
    return tuple(tuple(tuple(sorted(own)) for own in held[t]) for t in (Tensor.Q, Tensor.K))


def _parts_of(placed: Sharding, table: tuple[range, ...]) -> tuple[tuple[int, ...], ...]:
    """Per rank, the chunks of a plan that make up its chunks, each of them whole."""
    owner = {
        at: (rank, c)
        for rank, own in enumerate(placed.owned)
        for c in own
        for at in placed.chunks[c]
    }
    of: dict[tuple[int, int], list[int]] = {}
    for number, chunk in enumerate(table):
        if chunk:
            (where,) = {owner[at] for at in chunk}  # no part lies in two chunks
            of.setdefault(where, []).append(number)
    return tuple(
        tuple(part for c in own for part in of.get((rank, c), ()))
        for rank, own in enumerate(placed.owned)
    )


def plans(name: str, problem: Problem) -> list[Plan]:
    """Both directions, or none where a strategy cannot do the problem and says so."""
    chosen = strategy(name)
    if name == "ulysses" and problem.cp > problem.heads_q:
        with pytest.raises(UnsupportedError, match=r"must not exceed heads_q .*; try "):
            chosen.plan(problem, Direction.FORWARD)
        return []
    if name not in PLACEMENTS and name != "usp" and refuses(name, problem):
        return []  # what a strategy that is new refuses, its author knows
    return [chosen.plan(problem, direction) for direction in Direction]


def refuses(name: str, problem: Problem) -> bool:
    """Whether a strategy cannot do a problem; it must then say what is near."""
    try:
        strategy(name).plan(problem, Direction.FORWARD)
    except UnsupportedError as error:
        if not error.nearest:
            raise
        return True
    return False


def received(plan: Plan) -> list[int]:
    """Bytes that each rank receives."""
    got = [0] * plan.problem.cp
    for task in plan.tasks:
        for leg in legs_of(task):
            got[leg.dst.rank] += leg_bytes(plan, leg)
    return got


@every_strategy
@given(problems())
def test_every_plan_is_proved_and_ends_at_the_tokens_owners(name: str, problem: Problem) -> None:
    both = plans(name, problem)
    for plan in both:
        verify(plan, owners(name, problem, both[0]))


@every_strategy
@given(problems())
def test_backward_starts_from_what_forward_left(name: str, problem: Problem) -> None:
    both = plans(name, problem)
    if both:
        check_pair(*both)


@every_strategy
@given(problems())
def test_a_plan_comes_back_from_json_and_plans_alike_twice(name: str, problem: Problem) -> None:
    for plan, again in zip(plans(name, problem), plans(name, problem), strict=True):
        assert plan == from_json(to_json(plan))
        assert plan.hash == again.hash


@pytest.mark.parametrize("text", ["usp:2x2", "usp:4x1", "usp:1x4", "usp:2x2,ring-inside=true"])
@pytest.mark.parametrize("placement", ["contiguous", "zigzag", "stripe", "balanced", "documents"])
def test_every_mesh_of_usp_is_proved(text: str, placement: str) -> None:
    problem = Problem(pattern=make_pattern("causal", 37), heads_q=12, heads_kv=4, head_dim=8, cp=4)
    both = plans(f"{text},placement={placement}", problem)
    for plan in both:
        verify(plan)
    check_pair(*both)


# Volumes ------------------------------------------------------------------------------------


def shapes(text: str) -> list[Problem]:
    return [
        Problem(
            pattern=make_pattern(text, seqlen),
            heads_q=heads_q,
            heads_kv=heads_kv,
            head_dim=8,
            head_dim_v=6,
            batch=3,
            dtype=Dtype.BFLOAT16,
            cp=cp,
        )
        for seqlen, cp, (heads_q, heads_kv) in product((24, 37), (2, 3, 4), HEADS)
    ]


def owned(name: str, problem: Problem) -> list[int]:
    """Tokens of each rank."""
    shards = sharding(name, problem, problem.seqlen_kv)
    return [shards.tokens(rank) for rank in range(problem.cp)]


def kv_bytes(problem: Problem, size: int) -> int:
    """Bytes of one token of k and v, or of dk and dv, at `size` bytes per element."""
    return problem.batch * problem.heads_kv * (problem.head_dim + problem.head_dim_v) * size


@pytest.mark.parametrize("name", ["ring-classic", "ring", "zigzag", "stripe", "allgather"])
def test_each_rank_receives_every_other_ranks_keys_once(name: str) -> None:
    """For equal chunks and head widths: 2 * S * heads_kv * D * (cp - 1) / cp elements."""
    for problem in shapes("full"):
        forward, _ = plans(name, problem)
        mine, token = owned(name, problem), kv_bytes(problem, 2)
        assert [(problem.seqlen_kv - own) * token for own in mine] == received(forward)


def test_the_double_ring_brings_every_key_once_too() -> None:
    for problem in shapes("full"):
        if problem.cp == 4:
            forward, _ = plans("double_ring:inner=2", problem)
            mine, token = owned("double_ring", problem), kv_bytes(problem, 2)
            assert [(problem.seqlen_kv - own) * token for own in mine] == received(forward)


def test_the_original_rings_gradients_travel_the_whole_circle() -> None:
    for problem in shapes("full"):
        _, backward = plans("ring-classic", problem)
        keys, grads = kv_bytes(problem, 2), kv_bytes(problem, 4)
        seqlen = problem.seqlen_kv
        expected = [
            (seqlen - own) * keys + seqlen * grads for own in owned("ring-classic", problem)
        ]
        assert expected == received(backward)


@pytest.mark.parametrize("name", ["ring", "zigzag", "stripe"])
def test_a_rings_gradients_start_at_the_first_visit(name: str) -> None:
    """The owner keeps its own share, so a rank never receives dk and dv of its left neighbour."""
    for problem in shapes("full"):
        _, backward = plans(name, problem)
        keys, grads = kv_bytes(problem, 2), kv_bytes(problem, 4)
        mine, seqlen = owned(name, problem), problem.seqlen_kv
        expected = [
            (seqlen - mine[rank]) * keys + (seqlen - mine[rank - 1]) * grads
            for rank in range(problem.cp)
        ]
        assert expected == received(backward)


def test_allgather_returns_one_partial_gradient_per_other_rank() -> None:
    for problem in shapes("full"):
        _, backward = plans("allgather", problem)
        keys, grads = kv_bytes(problem, 2), kv_bytes(problem, 4)
        expected = [
            (problem.seqlen_kv - own) * keys + (problem.cp - 1) * own * grads
            for own in owned("allgather", problem)
        ]
        assert expected == received(backward)


def test_ulysses_turns_q_k_v_and_out() -> None:
    for problem in shapes("full"):
        forward, _ = plans("ulysses", problem)
        d_k, d_v, heads = problem.head_dim, problem.head_dim_v, problem.heads_q
        expected = []
        for own, mine in zip(
            owned("ulysses", problem), balanced_heads(problem, problem.cp), strict=True
        ):
            n, m = mine.bit_count(), problem.kv_heads(mine).bit_count()
            others = problem.seqlen_q - own
            elements = others * (n * d_k + m * (d_k + d_v)) + own * (heads - n) * d_v
            expected.append(problem.batch * elements * 2)
        assert expected == received(forward)


@pytest.mark.parametrize("name", ["ring", "allgather"])
def test_a_causal_pattern_brings_only_earlier_keys(name: str) -> None:
    for problem in shapes("causal"):
        forward, _ = plans(name, problem)
        mine, token = owned(name, problem), kv_bytes(problem, 2)
        assert [sum(mine[:rank]) * token for rank in range(problem.cp)] == received(forward)


# Heads --------------------------------------------------------------------------------------


def cuts(heads: int, ranks: int, cap: int) -> list[tuple[int, ...]]:
    """Every way to cut heads into runs of 1..cap, one per rank."""
    runs = product(range(1, cap + 1), repeat=ranks)
    return [run for run in runs if sum(run) == heads]


def copies(run: tuple[int, ...], group: int) -> int:
    """KV heads that ranks hold, copies counted."""
    start, total = 0, 0
    for length in run:
        total += (start + length - 1) // group - start // group + 1
        start += length
    return total


@pytest.mark.parametrize(("heads_q", "heads_kv"), [*HEADS, (6, 3), (8, 2), (9, 3), (10, 2)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6])
def test_heads_are_dealt_with_the_fewest_copies_of_kv_heads(
    heads_q: int, heads_kv: int, ranks: int
) -> None:
    if ranks > heads_q:
        return
    problem = Problem(
        pattern=make_pattern("full", 9), heads_q=heads_q, heads_kv=heads_kv, head_dim=4
    )
    dealt = balanced_heads(problem, ranks)
    run = tuple(heads.bit_count() for heads in dealt)
    best = min(
        (copies(other, problem.group), sum(length**2 for length in other))
        for other in cuts(heads_q, ranks, -(-heads_q // ranks))
    )

    assert best == (copies(run, problem.group), sum(length**2 for length in run))
    assert problem.all_heads == sum(dealt)
    assert list(dealt) == sorted(dealt)


# Text ---------------------------------------------------------------------------------------


def grids(name: str) -> str:
    """Both directions at cp = 4: causal, 26 tokens, 6 query heads and 2 KV heads.

    A file's name has a comma where options have their colon.
    """
    problem = Problem(pattern=make_pattern("causal", 26), heads_q=6, heads_kv=2, head_dim=8, cp=4)
    context = Context(gpus_per_node=2)
    return "\n\n".join(
        str(strategy(name.replace(",", ":", 1)).plan(problem, direction, context))
        for direction in Direction
    )


@pytest.mark.parametrize("name", sorted(path.stem for path in GOLDEN.glob("*.txt")))
def test_the_grid_is_the_golden_one(name: str) -> None:
    assert (GOLDEN / f"{name}.txt").read_text() == grids(name) + "\n"


def test_the_strategies_of_the_first_release_have_golden_grids() -> None:
    # A strategy that is added later is tested without one until its author writes it.
    first = {"ring", "ring-classic", "zigzag", "stripe", "double_ring", "allgather", "ulysses"}
    drawn = {path.stem.partition(",")[0] for path in GOLDEN.glob("*.txt")}
    assert first | {"usp"} <= drawn <= set(STRATEGIES)


if __name__ == "__main__":
    for each in (*RULES, *DRAWN):
        (GOLDEN / f"{each}.txt").write_text(grids(each) + "\n")

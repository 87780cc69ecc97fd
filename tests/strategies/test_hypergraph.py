"""The hypergraph of blocks: its cut against all cuts, what it moves, what it computes."""

from itertools import product

import pytest

from harness.check.cell import check
from harness.errors import UnsupportedError
from harness.explain.volumes import received_bytes
from harness.plan.imbalance import imbalance_total
from harness.plan.problem import Direction, Dtype, Problem
from harness.planning.hypergraph import (
    INSTALL,
    Hypergraph,
    can_cut,
    chunk_homes,
    cut_hypergraph,
)
from harness.records.check_record import Outcome
from harness.records.config import Config
from patterns import make_pattern
from strategies import hypergraph, strategy

needs_the_library = pytest.mark.skipif(not can_cut(), reason=f"no mtkahypar; {INSTALL}")


def connectivity(graph: Hypergraph, parts: list[int]) -> float:
    """Cost of each edge, for each part that it meets but one."""
    pairs = zip(graph.edges, graph.costs, strict=True)
    return sum(cost * (len({parts[v] for v in edge}) - 1) for edge, cost in pairs)


@needs_the_library
def test_a_cut_is_even_and_as_cheap_as_the_cheapest_of_all() -> None:
    graph = Hypergraph(
        weights=(3, 1, 2, 2, 1, 3, 2, 2),
        edges=((0, 1, 2), (2, 3), (3, 4, 5), (5, 6), (6, 7, 0), (1, 4), (1,)),
        costs=(5, 1, 4, 2, 3, 1, 9),
    )

    def loads(parts: list[int]) -> list[float]:
        return [sum(w for w, p in zip(graph.weights, parts, strict=True) if p == k) for k in (0, 1)]

    even = [list(each) for each in product((0, 1), repeat=8) if max(loads(list(each))) <= 8]
    found = cut_hypergraph(graph, 2, 0.03)

    assert max(loads(found)) <= 8
    assert connectivity(graph, found) == min(connectivity(graph, each) for each in even)
    assert found == cut_hypergraph(graph, 2, 0.03)


def test_what_nothing_joins_is_dealt_by_weight() -> None:
    graph = Hypergraph(weights=(1, 5, 2, 4), edges=((2,),), costs=(3,))

    assert cut_hypergraph(graph, 1, 0.03) == [0, 0, 0, 0]
    parts = cut_hypergraph(graph, 2, 0.03)
    assert sorted(
        sum(w for w, p in zip((1, 5, 2, 4), parts, strict=True) if p == k) for k in (0, 1)
    )
    assert {parts[1], parts[3]} == {0, 1}


def test_a_part_of_a_graph_keeps_the_edges_that_it_has_whole_or_in_part() -> None:
    graph = Hypergraph(weights=(1, 2, 3, 4), edges=((0, 1, 3), (1, 2), (2, 3)), costs=(5, 6, 7))

    assert graph.among([3, 1]) == Hypergraph(weights=(4, 2), edges=((1, 0),), costs=(5,))


def problem(pattern: str, seqlen: int, cp: int) -> Problem:
    return Problem(
        pattern=make_pattern(pattern, seqlen),
        heads_q=8,
        heads_kv=2,
        head_dim=64,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )


@needs_the_library
@pytest.mark.parametrize(
    "pattern", ["causal_blockwise:block=2000", "documents:preset=pile_arxiv,seed=5", "causal"]
)
def test_work_is_even(pattern: str) -> None:
    plan = strategy("hypergraph").plan(problem(pattern, 30_011, 5), Direction.FORWARD)

    assert imbalance_total(plan) <= 1.05


@needs_the_library
def test_a_sink_and_a_window_move_less_than_where_rows_stay_with_balanced_owners() -> None:
    wanted = problem("lambda:sink=64,left=999", 30_011, 5)
    cut, dealt = (
        sum(received_bytes(strategy(text).plan(wanted, Direction.FORWARD)))
        for text in ("hypergraph", "owner:placement=balanced")
    )

    assert 0 < cut < dealt


@needs_the_library
def test_no_rank_owns_more_than_twice_the_even_share() -> None:
    for preset in ("pile_books", "megatron"):
        wanted = problem(f"documents:preset={preset},seed=2", 40_009, 7)
        plan = strategy("hypergraph").plan(wanted, Direction.FORWARD)
        owned = [0] * 7
        for place, piece in plan.initial:
            owned[place.rank] += plan.tokens(piece) if piece.tensor.value == "q" else 0
        assert sum(owned) == 40_009
        assert max(owned) <= 2 * 40_009 / 7 + 16  # a token for each chunk that does not divide


def test_a_rank_that_wants_all_chunks_gets_twice_the_even_number() -> None:
    cells = ((0,) * 10,) * 10
    queries, keys = chunk_homes(problem("full", 53, 5), cells, 2, 5)

    assert queries is keys
    assert len(queries.owned[0]) == 4
    assert sorted(chunk for own in queries.owned for chunk in own) == list(range(10))


@needs_the_library
@pytest.mark.parametrize(("text", "cp"), [("hypergraph", 3), ("hypergraph:parts=3", 4)])
def test_it_computes_attention(text: str, cp: int) -> None:
    cell = Config(
        strategy=text,
        pattern="documents:lengths=29+2+22,window=13",
        cp=cp,
        seqlen_q=53,
        seqlen_kv=53,
        heads_q=6,
        heads_kv=2,
        head_dim=5,
        batch=2,
        dtype=Dtype.FLOAT64,
    )
    for judged in check(cell):
        assert judged.status is Outcome.PASSED, judged.reason
        assert max(judged.max_rel_error.values()) <= 1e-12


def test_without_the_library_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hypergraph, "can_cut", lambda: False)
    with pytest.raises(UnsupportedError, match=r"mtkahypar is not installed; try pip install"):
        strategy("hypergraph").plan(problem("causal", 53, 3), Direction.FORWARD)


@needs_the_library
def test_more_chunks_than_a_plan_may_have_are_refused_before_they_are_made() -> None:
    """Their pairs alone would take gigabytes."""
    with pytest.raises(UnsupportedError, match=r"9000 chunks.*4096.*try hypergraph:parts=1365"):
        strategy("hypergraph:parts=3000").plan(problem("causal", 97, 3), Direction.FORWARD)

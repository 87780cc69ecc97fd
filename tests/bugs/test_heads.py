"""Heads that ranks do not divide, KV heads that are fewer than ranks, head_dim that differ."""

import pytest
import torch

import strategies
from harness.attention import context_parallel, run_all
from harness.errors import UnsupportedError
from harness.plan import heads as head_sets
from harness.plan.problem import Direction, Problem
from harness.planning.builder import balanced_heads
from tests.support import EVERY_STRATEGY, problem, ranks, run, wrong


def heads_of(p: Problem) -> list[int]:
    """How many query heads each rank of a Ulysses group attends."""
    return [heads.bit_count() for heads in balanced_heads(p, p.cp)]


def refused() -> str:
    """Run on a rank: what it hears of more ranks than heads."""
    try:
        context_parallel(seqlen=24, heads_q=1, strategy="ulysses")
    except UnsupportedError as error:
        return str(error)
    return "not refused"


def test_b016_a_kv_head_is_copied_to_each_rank_that_needs_it_and_its_gradients_add_up() -> None:
    p = problem("causal", 23, (16, 2), cp=4)
    assert heads_of(p) == [4, 4, 4, 4]
    assert [p.kv_heads(heads) for heads in balanced_heads(p, 4)] == [1, 1, 2, 2]
    assert wrong(p, "ulysses") == ""


@pytest.mark.parametrize("cp", [3, 5, 8, 16])
def test_b016_every_rank_has_a_kv_head(cp: int) -> None:
    p = problem("causal", 23, (16, 2), batch=1, cp=cp)
    assert all(p.kv_heads(heads) for heads in balanced_heads(p, cp))
    assert wrong(p, "ulysses") == ""


def test_b018_heads_that_ranks_do_not_divide_are_dealt_unevenly() -> None:
    p = problem("causal", 23, (28, 4), dims=(4, 4), batch=1, cp=8)
    assert sorted(heads_of(p)) == [3, 3, 3, 3, 4, 4, 4, 4]
    assert wrong(p, "ulysses") == ""


def test_b018_what_is_illegal_is_refused_on_every_rank_before_anything_runs() -> None:
    told = ranks(2).run(refused)
    assert told[0] == told[1]
    assert told[0].startswith("ulysses: cp (2) must not exceed heads_q (1)")
    assert "usp:1x2" in told[0]


def test_b020_heads_are_dealt_by_the_problem_alone() -> None:
    p = problem("causal", 23, (12, 12), batch=1, cp=4)
    before = strategies.strategy("ulysses").plan(p, Direction.FORWARD).hash
    for heads in ((9, 3), (3, 3), (7, 7)):
        strategies.strategy("usp").plan(problem("causal", 23, heads, cp=3), Direction.FORWARD)
    assert heads_of(p) == [3, 3, 3, 3]
    assert strategies.strategy("ulysses").plan(p, Direction.FORWARD).hash == before
    assert wrong(p, "ulysses") == ""


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
@pytest.mark.parametrize("dims", [(24, 16), (16, 24)])
def test_b024_keys_and_values_may_differ_in_width(dims: tuple[int, int], strategy: str) -> None:
    p = problem("causal", 23, (8, 2), dims=dims, cp=2)
    assert wrong(p, strategy) == ""
    assert run(p, strategy).results["out"].shape == (2, 8, 23, dims[1])


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_b026_a_query_head_uses_its_own_kv_head(strategy: str) -> None:
    p = problem("causal", 8, (8, 2), cp=2)  # as many tokens as query heads, to be mixed up
    assert wrong(p, strategy) == ""


def test_b026_groups_of_query_heads_that_share_a_kv_head_are_neighbours() -> None:
    p = problem("causal", 8, (8, 2), cp=2)
    assert [p.kv_heads(1 << head) for head in range(8)] == [1, 1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("heads", "cp"),
    [((64, 8), 16), ((32, 8), 2), ((64, 16), 8), ((32, 16), 8), ((32, 32), 8)]
    + [((40, 8), cp) for cp in (8, 10, 16, 40)]
    + [((28, 4), cp) for cp in (4, 7, 8)]
    + [((30, 30), 4), ((12, 12), 4), ((4, 2), 4)],
)
def test_s10_the_map_of_heads_is_a_permutation_for_every_degree(
    heads: tuple[int, int], cp: int
) -> None:
    p = problem("causal", cp + 3, heads, dims=(2, 2), batch=1, cp=cp)
    dealt = [head for rank in balanced_heads(p, cp) for head in head_sets.members(rank)]
    assert sorted(dealt) == list(range(heads[0]))
    assert wrong(p, "ulysses") == ""


@pytest.mark.parametrize("strategy", ["ulysses", "usp:2x2"])
def test_s10_each_head_ends_where_it_began(strategy: str) -> None:
    p = problem("full", 9, (8, 2), dims=(8, 8), batch=1, cp=4)
    q, k, v = (torch.zeros(1, heads, 9, 8, dtype=torch.float64) for heads in (8, 2, 2))
    v += torch.arange(1.0, 3.0, dtype=torch.float64)[:, None, None]
    out = run_all(p, strategy, q, k, v).results["out"]
    assert out[0, :, 0, 0].tolist() == [1.0] * 4 + [2.0] * 4


@pytest.mark.parametrize(("heads", "cp"), [((40, 8), 5), ((24, 8), 3)])
def test_s10_a_rank_may_share_its_first_and_its_last_kv_head(
    heads: tuple[int, int], cp: int
) -> None:
    assert wrong(problem("causal", 11, heads, dims=(2, 2), batch=1, cp=cp), "ulysses") == ""

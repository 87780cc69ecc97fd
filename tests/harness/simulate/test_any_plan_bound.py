"""The bound that is nobody's plan: below every way to share a tiny problem, and every plan."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from harness.cluster.presets import cluster, h100
from harness.plan.least_volume import area_prices, reach_of, token_prices
from harness.plan.problem import Direction, Dtype, Problem
from harness.simulate.bounds import any_plan_bound, dealt_at_most, most_owned, problem_bound_s
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import strategy
from tests.hunt.beaten import races


def problem(pattern: str, seqlen: int, heads: tuple[int, int] = (6, 2), cp: int = 4) -> Problem:
    return Problem(
        pattern=make_pattern(pattern, seqlen),
        heads_q=heads[0],
        heads_kv=heads[1],
        head_dim=5,
        head_dim_v=3,
        batch=2,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )


def shares(p: Problem, direction: Direction) -> Iterator[tuple[float, int, int, int]]:
    """Every way two ranks share all pairs, tokens dealt in every way.

    Yields the larger area, the most queries and keys dealt to a rank, and all bytes received.
    """
    pairs = [
        (q, k, head)
        for q, k in product(range(p.seqlen_q), range(p.seqlen_kv))
        for head in range(p.heads_q)
        if p.pattern.area(range(q, q + 1), range(k, k + 1))
    ]
    prices = token_prices(p, direction)
    for who in product((0, 1), repeat=len(pairs)):
        queries: set[tuple[int, int, int]] = set()
        keys: set[tuple[int, int, int]] = set()
        for rank, (q, k, head) in zip(who, pairs, strict=True):
            queries.add((rank, q, head))
            keys.add((rank, k, head // p.group))
        area = max(sum(who), len(who) - sum(who))
        for owner_q in product((0, 1), repeat=p.seqlen_q):
            for owner_k in product((0, 1), repeat=p.seqlen_kv):
                moved = prices.query * sum(owner_q[q] != rank for rank, q, _ in queries)
                moved += prices.key * sum(owner_k[k] != rank for rank, k, _ in keys)
                most_q, most_k = (max(sum(o), len(o) - sum(o)) for o in (owner_q, owner_k))
                yield area, most_q, most_k, moved


@pytest.mark.parametrize(
    ("pattern", "seqlen", "heads"),
    [("causal", 2, (2, 1)), ("full", 2, (2, 1)), ("full", 2, (2, 2)), ("causal", 4, (1, 1))],
)
@pytest.mark.parametrize("direction", Direction)
def test_no_way_to_share_a_tiny_problem_moves_less(
    pattern: str, seqlen: int, heads: tuple[int, int], direction: Direction
) -> None:
    p = problem(pattern, seqlen, heads, cp=2)
    least: dict[tuple[float, int, int], int] = {}
    for area, most_q, most_k, moved in shares(p, direction):
        key = (area, most_q, most_k)
        least[key] = min(least.get(key, moved), moved)
    nearest = 0.0
    for (area, most_q, most_k), moved in least.items():
        # A rank computes no more than `area` in all, so no more of one group.
        bound = area_prices(p, direction, 2, (most_q, most_k)).least_bytes(area)
        assert bound <= moved
        nearest = max(nearest, bound / moved if moved else 0.0)
    assert nearest > (0.98 if heads == (2, 1) else 0.4)  # so it is no bound that holds anyway


def test_heads_apart_need_most_of_what_an_all_to_all_moves() -> None:
    p = problem("full", 2048, heads=(8, 4), cp=4)  # a KV head for each rank
    own = (512, 512)
    prices = token_prices(p, Direction.FORWARD)
    area = p.pattern.total_area * p.heads_q / p.cp
    moved = (prices.query * p.heads_q + prices.key * p.heads_kv) * 2048 * 3 // 4
    least = area_prices(p, Direction.FORWARD, 4, own).least_bytes(area)
    # Less, because each rank could attend its own tokens of all heads without any transfer.
    assert 0.75 * moved < least <= moved


def test_ranks_that_may_do_less_each_must_receive_more() -> None:
    p = problem("causal", 3000, heads=(6, 2), cp=8)
    prices = area_prices(p, Direction.BACKWARD, 8, (375, 375))
    even = p.pattern.total_area * p.heads_q / 8
    found = [prices.least_bytes(even * slack) for slack in (0.9 / p.heads_kv, 0.6, 1, 2, 4)]
    assert found[0] == float("inf")
    assert found[1:] == sorted(found[1:], reverse=True)
    assert found[-1] < found[1]


@pytest.mark.parametrize("text", ["causal", "strided", "global_local", "window:left=20,right=9"])
def test_reach_counts_what_the_dense_mask_has(text: str) -> None:
    pattern = make_pattern(text, 203)
    mask = pattern.allowed(np.arange(203), np.arange(203))
    for side, axis in ((reach_of(pattern).queries, 1), (reach_of(pattern).keys, 0)):
        degrees = np.sort(mask.sum(axis=axis))[::-1]
        assert side.largest.tolist() == degrees.tolist()
        for count, cap in ((0, 5), (7, 3), (150, 19), (203, 400)):
            assert side.most(count, cap) == np.minimum(degrees, cap)[:count].sum()


def test_slow_links_decide_and_fast_ones_do_not() -> None:
    p, machine = problem("full", 4096, heads=(6, 2), cp=16), h100(2)
    fast = any_plan_bound(p, Direction.FORWARD, machine)
    assert fast.what == "compute"
    assert fast.bound_s == problem_bound_s(p, Direction.FORWARD, machine)
    slow_nic = replace(machine.nic, bandwidth_bytes_per_s=1e6)
    slow = any_plan_bound(p, Direction.FORWARD, replace(machine, nic=slow_nic))
    assert slow.what == "links between nodes"
    assert slow.bound_s == pytest.approx(slow.nodes_s)
    assert slow.bound_s > 100 * fast.bound_s


def test_a_cpu_shares_its_cores() -> None:
    machine = cluster("local-cpu")
    assert machine.fitted is not None
    assert machine.fitted.hardware.cores == 2
    p = problem("causal", 999, cp=4)
    found = any_plan_bound(p, Direction.FORWARD, machine)
    assert found.compute_s == 2 * problem_bound_s(p, Direction.FORWARD, machine)


def test_a_layer_counts_compute_alone_and_an_empty_pattern_nothing() -> None:
    layer = replace(problem("causal", 999), hidden=30)
    found = any_plan_bound(layer, Direction.BACKWARD, h100(1))
    assert (found.ranks_s, found.nodes_s) == (0.0, 0.0)
    assert found.bound_s == found.compute_s > 0


def test_a_dealing_that_is_given_is_counted_from_the_plan() -> None:
    plan = strategy("zigzag").plan(problem("causal", 999), Direction.FORWARD)
    most = most_owned(plan)
    assert most[0] == most[1]
    assert 250 <= most[0] <= dealt_at_most(plan.problem)[0]
    assert verify(plan).plan is plan


def test_no_plan_beats_the_bound() -> None:
    found = list(races(36, seed=3, most=2))
    assert [race.text for race in found if race.won] == []
    decided = [race.own_dealing.what for race in found]
    assert len(found) > 60
    assert 10 < decided.count("compute") < len(found) - 10

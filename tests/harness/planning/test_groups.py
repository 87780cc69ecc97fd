"""Groups that share documents: Megatron's rule by hand, solved groups against all there are."""

from itertools import product

import pytest

from harness.cluster.presets import cluster
from harness.errors import UnsupportedError
from harness.plan.problem import Problem
from harness.planning.groups.choosing import (
    even_share,
    predicted_groups,
    scheduled_groups,
    sized_groups,
)
from harness.planning.groups.grouping import Grouping, Shared, deal_groups
from harness.planning.groups.megatron import megatron_groups, ranks_needed
from harness.planning.groups.prices import GroupPrices, group_prices
from harness.planning.groups.solving import grouping_s, most_tokens, solved_groups
from harness.planning.planned_for import USUAL
from patterns import make_pattern

FAST = cluster("h100-1x8")


def pack(*lengths: int, cp: int = 3) -> Problem:
    text = f"documents:lengths={'+'.join(map(str, lengths))}"
    pattern = make_pattern(text, sum(lengths))
    return Problem(pattern=pattern, heads_q=32, heads_kv=8, cp=cp, **USUAL)


def prices(problem: Problem) -> GroupPrices:
    return group_prices(FAST, problem)


# Megatron's rule ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "most", "ranks", "needed"),
    [(1, 8, 8, 1), (8, 8, 8, 1), (9, 8, 8, 2), (17, 8, 8, 4), (33, 8, 8, 8), (33, 8, 6, 6)],
)
def test_a_document_needs_a_power_of_two_of_ranks(
    length: int, most: int, ranks: int, needed: int
) -> None:
    assert ranks_needed(length, most, ranks) == needed


@pytest.mark.parametrize(
    ("lengths", "ranks", "most", "groups"),
    [
        # The long one takes two ranks; the short ones fill the others in turn.
        ((8, 2, 2, 2, 2), 4, 4, ((0, 1), (2,), (3,), (2,), (3,))),
        # Two ranks would be idle, so the smallest groups double, and later ones move up.
        ((4, 1), 4, 4, ((0, 1), (2, 3))),
        # The third would make rank 0 twice as full as rank 1: it waits, and then has both.
        ((3, 3, 3), 2, 3, ((0,), (1,), (0, 1))),
        # Longest first, whatever their order in the pack.
        ((2, 2, 8, 2, 2), 4, 4, ((2,), (3,), (0, 1), (2,), (3,))),
        # Even after the fifth, so the round ends: the others have the next one to themselves.
        ((8, 4, 4, 4, 4, 4, 4), 4, 4, ((0, 1), (2,), (3,), (2,), (3,), (0, 1), (2, 3))),
        # Three ranks: the group of two grows to all of them.
        ((5, 1), 3, 2, ((0, 1, 2), (0, 1, 2))),
    ],
)
def test_documents_go_where_megatron_puts_them(
    lengths: tuple[int, ...],
    ranks: int,
    most: int,
    groups: tuple[tuple[int, ...], ...],
) -> None:
    found = megatron_groups(lengths, ranks, most)

    assert found == groups


def test_a_document_that_all_ranks_cannot_hold_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"most \(4\) .* 3 ranks hold a document of 40 tokens; try most=14"
    ):
        scheduled_groups(pack(40, 7), 4)


# Solved groups --------------------------------------------------------------------------------


def every_grouping(problem: Problem) -> list[Grouping]:
    """Every choice of neighbouring ranks for every document."""
    ranks = range(problem.cp)
    windows = [tuple(range(a, b + 1)) for a, b in product(ranks, ranks) if a <= b]
    documents = [range(band.q0, band.q1) for band in problem.pattern.bands]
    choices = product(windows, repeat=len(documents))
    return [tuple(map(Shared, documents, each)) for each in choices]


@pytest.mark.parametrize(
    "lengths",
    [
        (30_000, 9_000, 8_000, 500),
        (9_000, 8_000, 7_000, 6_500),
        (20_000, 300, 20_500, 9_000),
        (2_000, 1_900, 1_700, 1_100),
        (50_000, 100, 101, 103),
    ],
)
def test_solved_groups_are_near_the_best_of_all(lengths: tuple[int, ...]) -> None:
    problem = pack(*lengths)
    most = 2 * -(-problem.seqlen_q // 3)
    fitting = [each for each in every_grouping(problem) if most_tokens(each, 3) <= most]
    best = min(grouping_s(problem, each, prices(problem)) for each in fitting)
    found = solved_groups(problem, most, prices(problem))[0]

    assert best * (1 - 1e-9) <= grouping_s(problem, found, prices(problem)) <= 1.05 * best


def test_moves_bring_a_dozen_documents_nearer_to_an_even_spread() -> None:
    """Without them this pack is 9 % above the mean work of ranks that share nothing."""
    lengths = (462, 6167, 490, 1113, 14_712, 4060, 1635, 4553, 300, 2610, 3283, 565)
    problem = pack(*lengths, cp=7)
    priced, most = prices(problem), 2 * -(-problem.seqlen_q // 7)
    even_s = sum(priced.work_s(n, n * (n + 1) // 2, 1) for n in lengths) / 7
    found = solved_groups(problem, most, priced)[0]

    assert even_s < grouping_s(problem, found, priced) <= 1.06 * even_s


@pytest.mark.parametrize("room", [1.1, 1.5, 2.0])
def test_no_rank_gets_more_tokens_than_it_may(room: float) -> None:
    problem = pack(9_001, *[97] * 200, 3_001, 777, cp=7)
    most = int(room * problem.seqlen_q / 7)
    for each in solved_groups(problem, most, prices(problem)):
        dealt = deal_groups(each, 7)
        # Tokens of a document that do not divide make one more.
        assert max(map(dealt.tokens, range(7))) <= most + len(each)


def test_tokens_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"most \(5\) must leave room on 3 ranks for 50"):
        predicted_groups(pack(30, 20), 5, prices(pack(30, 20)), None)


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_never_behind_megatrons_by_its_own_prediction(seed: int) -> None:
    pattern = make_pattern(f"documents:preset=megatron,seed={seed}", 40_961)
    problem = Problem(pattern=pattern, heads_q=32, heads_kv=8, cp=7, **USUAL)
    rival = scheduled_groups(problem, even_share(problem))

    def formula(each: Grouping) -> float:
        return grouping_s(problem, each, prices(problem))

    def likes_the_rival(each: Grouping) -> float:
        return 0.0 if each == rival else 1.0

    roomy = problem.seqlen_q
    assert formula(predicted_groups(problem, roomy, prices(problem), None)) <= formula(rival)
    assert predicted_groups(problem, roomy, prices(problem), likes_the_rival) == rival


def test_given_sizes_are_kept() -> None:
    problem = pack(40_000, 900, 800, 700, cp=5)
    found = sized_groups(problem, problem.seqlen_q, prices(problem), (3, 1, 1))

    assert {each.members for each in found} <= {(0, 1, 2), (3,), (4,)}
    assert found[0].members == (0, 1, 2)
    with pytest.raises(UnsupportedError, match=r"groups \(4\+2\) must have the 5 ranks .* have 6"):
        sized_groups(problem, problem.seqlen_q, prices(problem), (4, 2))


def test_documents_lie_head_tail_over_their_members_alone() -> None:
    grouping = (
        Shared(range(8), (0, 1)),
        Shared(range(8, 11), (2,)),
        Shared(range(11, 18), (1, 2)),
    )
    dealt = deal_groups(grouping, 4)

    assert [dealt.positions(rank) for rank in range(4)] == [
        [0, 1, 6, 7],
        [2, 3, 4, 5, 11, 12, 16, 17],
        [8, 9, 10, 13, 14, 15],
        [],
    ]

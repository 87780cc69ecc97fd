"""Placements that depend on the pattern: every token once, equal counts, even work, refusals."""

from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given

from harness.check.cell import check
from harness.check.run import check_group
from harness.errors import UnsupportedError
from harness.plan.dealing import DEALT, deal, deal_tokens, head_tail, separate_documents, snake
from harness.plan.problem import Direction, Dtype
from harness.plan.sharding import Placement, Sharding, zigzag
from harness.records.check_record import Outcome
from harness.records.config import Config
from patterns import Pattern, make_pattern
from strategies import strategy
from tests.patterns.generators import any_patterns

TOKENS = 65536


def packs(count: int, seqlen: int) -> list[Pattern]:
    """Causal packs of 3 to 60 documents, from nearly equal to one that has nearly all."""
    made = []
    for seed in range(count):
        random = Random(seed)
        weights = [random.paretovariate(0.4 + seed / 4) for _ in range(random.randint(3, 60))]
        cuts = np.cumsum(weights) / sum(weights) * (seqlen - len(weights))
        ends = [int(cut) + at + 1 for at, cut in enumerate(cuts[:-1])] + [seqlen]
        lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        made.append(make_pattern(f"documents:lengths={'+'.join(map(str, lengths))}", seqlen))
    return made


def work(pattern: Pattern, sharding: Sharding) -> list[int]:
    """Causal pairs of each rank, counted position by position."""
    seen = np.zeros(pattern.seqlen_q, dtype=np.int64)
    for band in pattern.bands:
        seen[band.q0 : band.q1] = np.arange(1, band.q1 - band.q0 + 1)
    return [int(seen[sharding.positions(rank)].sum()) for rank in range(len(sharding.owned))]


@given(any_patterns)
def test_every_token_has_one_owner_and_ranks_own_equally_many(pattern: Pattern) -> None:
    for placement, ranks in product(DEALT, (1, 3, 4)):
        sides = deal_tokens(pattern, ranks, placement)
        for sharding, seqlen in zip(sides, (pattern.seqlen_q, pattern.seqlen_kv), strict=True):
            owned = [sharding.positions(rank) for rank in range(ranks)]
            assert sorted(p for own in owned for p in own) == list(range(seqlen))
            assert all(own == sorted(own) for own in owned)
            if placement is Placement.DOCUMENTS and pattern.seqlen_q == pattern.seqlen_kv:
                assert max(map(len, owned)) - min(map(len, owned)) <= 1
            each = {len(chunks) for chunks in sharding.owned}
            assert placement is Placement.DOCUMENTS or len(each) == 1


@pytest.mark.parametrize("ranks", [8, 64])
def test_balanced_chooses_chunks_that_are_even_on_ten_packs(ranks: int) -> None:
    for pattern in packs(10, TOKENS):
        found = work(pattern, deal_tokens(pattern, ranks, Placement.BALANCED)[0])
        dealt = deal(pattern, ranks, Placement.BALANCED)
        assert max(found) * ranks / sum(found) <= 1.02
        assert dealt.most == max(found) >= dealt.bound


def test_documents_are_even_on_ten_packs() -> None:
    for pattern in packs(10, TOKENS):
        found = work(pattern, deal_tokens(pattern, 8, Placement.DOCUMENTS)[0])
        assert max(found) * 8 / sum(found) <= 1.01


def test_a_deal_is_the_one_by_hand() -> None:
    """1 + 2 + 3, 4 + 5 + 6, 7 + 8 + 9 and three documents of one token: 24 | 15 + 6, then 3."""
    pattern = make_pattern("documents:lengths=9+1+1+1", 12)
    dealt = deal(pattern, 2, Placement.BALANCED, 3)
    assert dealt.areas == (6, 15, 24, 3)
    assert dealt.hands == ((2, 3), (0, 1))
    assert (dealt.most, dealt.bound, dealt.imbalance) == (27, 27, 27 / 24)
    assert snake((9, 7, 5, 3, 2, 1), 2) == ((0, 3, 4), (1, 2, 5))


def test_documents_are_dealt_head_tail_and_what_is_left_over_goes_round() -> None:
    found = head_tail([range(5), range(5, 14)], 2)
    assert [found.positions(rank) for rank in range(2)] == [
        [0, 1, 4, 5, 6, 12, 13],
        [2, 3, 7, 8, 9, 10, 11],
    ]
    assert head_tail([range(16)], 2) == zigzag(16, 2)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("documents:lengths=4+1+7,window=2", [4, 1, 7]),
        ("varlen_block_causal:lengths=4+1+7,block=3", [4, 1, 7]),
        ("window:left=2", [12]),
        ("shared_question", [12]),
    ],
)
def test_documents_are_found_where_nobody_sees_across(text: str, lengths: list[int]) -> None:
    assert lengths == [len(document) for document in separate_documents(make_pattern(text, 12))]


CASES = [
    (
        "allgather:placement=balanced,chunk=38",
        r"chunk \(38\) must be at most .* length \(37\).*=10",
    ),
    ("ring:placement=zigzag,chunk=3", r"chunk \(3\) is of placement=balanced and placement=ptrr"),
]


@pytest.mark.parametrize(("text", "message"), CASES)
def test_a_chunk_that_cannot_be_is_refused(text: str, message: str) -> None:
    config = cell(text, "causal", 4, 37)
    with pytest.raises(UnsupportedError, match=message):
        strategy(text).plan(config.problem, Direction.FORWARD)


def test_too_many_chunks_are_refused_with_a_number_that_is_not() -> None:
    pattern = make_pattern("causal", 100_000)
    with pytest.raises(
        UnsupportedError, match=r"makes 33336 chunks, .* at most 4096; try chunk=25"
    ):
        deal(pattern, 8, Placement.PTRR, 3)
    assert len(deal(pattern, 8, Placement.PTRR, 25).areas) <= 4096
    many = [range(at, at + 10) for at in range(0, 10_000, 10)]
    with pytest.raises(UnsupportedError, match=r"1000 documents over 8 ranks make 10000 chunks"):
        head_tail(many, 8)


# On tensors -----------------------------------------------------------------------------------


def cell(text: str, pattern: str, cp: int, seqlen: int = 53) -> Config:
    return Config(
        strategy=text,
        pattern=pattern,
        cp=cp,
        seqlen_q=seqlen,
        seqlen_kv=seqlen,
        heads_q=6,
        heads_kv=2,
        head_dim=5,
        batch=2,
        dtype=Dtype.FLOAT64,
    )


@pytest.mark.parametrize("name", ["ring", "allgather", "owner", "double_ring", "usp"])
def test_every_dealt_placement_computes_attention(name: str) -> None:
    texts = ("documents:lengths=20+1+32,window=7", "lambda:sink=5,left=9", "random_topk:block=7")
    for (placement, text), cp in zip(
        zip(("balanced,chunk=3", "documents", "ptrr,chunk=2"), texts, strict=True),
        (3, 4, 2),
        strict=True,
    ):
        for judged in check(cell(f"{name}:placement={placement}", text, cp)):
            assert judged.status is Outcome.PASSED, judged.reason
            assert max(judged.max_rel_error.values()) <= 1e-12


def test_processes_give_the_same_bits_as_one() -> None:
    cells = [
        cell("allgather:placement=documents", "documents:lengths=20+1+32,window=7", 2),
        cell("ring:placement=balanced,chunk=3", "varlen_block_causal:lengths=20+33,block=6", 2),
        cell("dynamic:groups=2,inner=ring", "documents:lengths=20+1+32,window=7", 2),
        cell("dynamic:rule=megatron", "documents:lengths=20+1+32", 2),
        cell("hypergraph", "documents:lengths=20+1+32", 2),
    ]
    for pair in check_group(cells, jobs=1, repeat=1):
        for judged in pair:
            assert judged.status is Outcome.PASSED, judged.reason

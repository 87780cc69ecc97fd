"""Defects of UPipe's published code: wrong when written out, caught when planned or run here.

Each is first computed densely, to see that it is wrong and by how much; then it is put into a plan
or a run, which must fail for that reason; and our own way must not.

Source: reading the code of Untied-Ulysses at e465aa8.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor as Values

from harness.check.cell import check
from harness.errors import MisfitError, MissedPairError, OverwriteError
from harness.execute import interpreter
from harness.execute.kernels import Mask
from harness.plan.heads import members
from harness.plan.kernel_calls import Call
from harness.plan.masks import MaskKind
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Sharding, contiguous, split
from harness.plan.tasks import Tensor, Tile
from harness.planning.builder import PlanBuilder
from harness.planning.token_owners import finish_tokens, hold_tokens
from harness.proved import plans
from harness.records.config import Config
from harness.verify.proof import verify
from patterns.pattern import Pattern
from strategies import strategy, upipe
from tests.harness.mutations import changed
from tests.support import layer_config, layer_problem


def layer(heads: tuple[int, int], cp: int, *, pattern: str = "causal", seqlen: int = 37) -> Problem:
    return layer_problem(pattern, seqlen, heads, dims=(6, 5), cp=cp)


def config(text: str, heads: tuple[int, int], cp: int) -> Config:
    return layer_config(text, "causal", cp, heads, head_dim=6, rotary=None)


def verdicts(text: str, heads: tuple[int, int], cp: int) -> list[str]:
    return [cell.reason for cell in check(config(text, heads, cp)) if cell.status != "passed"]


def drawn(*shape: int, seed: int) -> Values:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def partial(q: Values, k: Values, v: Values) -> tuple[Values, Values]:
    """Out and lse of one head over some keys."""
    scores = q @ k.T / q.shape[1] ** 0.5
    return scores.softmax(1) @ v, scores.logsumexp(1)


def merged(parts: Sequence[tuple[Values, Values]]) -> Values:
    lses = torch.stack([lse for _, lse in parts])
    weights = lses.softmax(0)[:, :, None]
    return (weights * torch.stack([out for out, _ in parts])).sum(0)


# 1. Queries go round the ring, and what they attended stays behind --------------------------------


@pytest.mark.parametrize("ring", [2, 4])
def test_merging_what_visiting_queries_attended_into_the_own_output_is_wrong(ring: int) -> None:
    size = 13
    q, k, v = (drawn(ring, size, 6, seed=seed) for seed in range(3))
    whole = [partial(q[r], k.flatten(0, 1), v.flatten(0, 1))[0] for r in range(ring)]
    for rank in range(ring):
        visitors = [partial(q[(rank - step) % ring], k[rank], v[rank]) for step in range(ring)]
        keys = [partial(q[rank], k[other], v[other]) for other in range(ring)]
        assert (merged(visitors) - whole[rank]).abs().max() > 0.5
        assert (merged(keys) - whole[rank]).abs().max() < 1e-14


def test_queries_that_travel_and_do_not_send_their_partial_results_home_are_caught() -> None:
    problem = replace(layer((4, 2), 2, pattern="full"), hidden=None, rotary=None)
    queries = contiguous(problem.seqlen_q, 2)
    b = PlanBuilder(problem, "q travels", Direction.FORWARD, queries, queries)
    every = problem.all_heads
    for rank in range(2):
        hold_tokens(b, rank)
    for rank in range(2):
        b.send(rank, 1 - rank, [Tensor.Q], (rank,), every)
    for rank, q in product(range(2), range(2)):
        b.tile(rank, (q,), (rank,), every)
    for rank in range(2):
        finish_tokens(b, rank)
    with pytest.raises(MissedPairError, match="lacks key chunks"):
        verify(b.build())


# 2. Masks by index where gathered tokens are out of order -----------------------------------------


def by_pairs_of_ranks(ranks: int, group: Sequence[int], tokens: int) -> list[int]:
    """As published: rank r has chunks r and 2 C - 1 - r, and a group holds them rank by rank."""
    chunks = [c for r in group for c in (r, 2 * ranks - 1 - r)]
    return [c * tokens + at for c in chunks for at in range(tokens)]


def test_a_mask_by_index_over_gathered_pairs_is_wrong() -> None:
    """8 x 2 ranks: 0 1 62 63 2 3 60 61 ... as published."""
    order = by_pairs_of_ranks(16, range(8), 2)
    assert order[:8] == [0, 1, 62, 63, 2, 3, 60, 61]
    at = torch.tensor(order)
    q, k, v = (drawn(len(order), 6, seed=seed) for seed in range(3))
    scores = q @ k.T / 6**0.5
    by_index = torch.ones(len(order), len(order), dtype=torch.bool).tril()
    by_position = at[:, None] >= at[None]
    wrong, right = (
        scores.masked_fill(~allowed, -torch.inf).softmax(1) @ v
        for allowed in (by_index, by_position)
    )
    assert (wrong - right).abs().max() > 0.5


@pytest.mark.parametrize("text", ["upipe", "upipe:ring=2", "upipe:ring=4", "usp:4x2"])
def test_our_gathered_tokens_are_in_order(text: str) -> None:
    """Pairs are dealt by ring position and then split over the group."""
    plan = strategy(text).plan(layer((8, 2), 8, seqlen=131), Direction.FORWARD)
    tiles = [task for task in plan.tasks if isinstance(task, Tile)]
    assert tiles
    for tile in tiles:
        for piece in tile.reads[:2]:
            positions = [p for chunk in plan.chunks(piece) for p in chunk]
            assert all(a < b for a, b in pairwise(positions))


def dealt_by_rank(_: Sharding, ranks: int) -> Sharding:
    """37 tokens on 2 groups of 2 ranks as published: they gather chunks 0 7 1 6 and 2 5 3 4."""
    assert ranks == 2
    chunks = split(37, 8)
    order = [c for r in range(4) for c in (r, 7 - r)]
    owned = tuple((2 * r, 2 * r + 1) for r in range(4))
    return Sharding(tuple(chunks[c] for c in order), owned)


def by_index(pattern: Pattern, q: Sequence[range], kv: Sequence[range]) -> list[Call]:
    """One causal call over all rows and columns, wherever they are in the sequence."""
    del pattern
    rows, columns = (sum(map(len, chunks)) for chunks in (q, kv))
    kind = MaskKind.CAUSAL if rows == columns else MaskKind.FULL
    return [Call((0, rows), (0, columns), Mask(kind, range(rows), range(columns)))]


def test_a_run_that_masks_by_index_fails_where_tokens_are_out_of_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Our masks go by position, so that any order is right; in our order an index is as good."""
    text, heads = "upipe:ring=2", (8, 2)
    with monkeypatch.context() as patch:
        patch.setattr(interpreter, "lower", by_index)
        assert verdicts(text, heads, 4) == []
    monkeypatch.setattr(upipe, "subdivided", dealt_by_rank)
    plans._kept.cache_clear()
    assert verdicts(text, heads, 4) == []
    monkeypatch.setattr(interpreter, "lower", by_index)
    wrong = verdicts(text, heads, 4)
    plans._kept.cache_clear()
    assert [reason.split(" by")[0] for reason in wrong] == ["y is off", "dx is off"]


# 3. A re-index of heads that is no permutation ----------------------------------------------------


def published_heads(problem: Problem, cp: int) -> list[list[int]]:
    """Per stage s, its heads (s' + i) g + s mod g, where s' is the first stage of the KV chunk.

    Right is (s // g) C + i in place of s' + i: the same in the first chunk, or where C = g.
    """
    g = problem.group
    return [
        [(stage // g * g + slot) * g + stage % g for slot in range(cp)]
        for stage in range(problem.heads_q // cp)
    ]


def published_stages(
    problem: Problem, ranks: int, stage_heads: int, *, in_order: bool = False
) -> tuple[tuple[int, ...], ...]:
    """The same, as a plan has them; one head for each rank."""
    assert (stage_heads, in_order) == (ranks, False)
    return tuple(tuple(1 << h for h in stage) for stage in published_heads(problem, ranks))


@pytest.mark.parametrize(
    ("heads", "cp", "permutes"),
    [
        ((32, 8), 8, True),
        ((64, 8), 8, True),
        ((16, 4), 4, True),
        ((32, 8), 4, True),
        ((32, 8), 2, False),
        ((32, 16), 8, False),
        ((40, 8), 4, False),
        ((64, 8), 4, False),
        ((32, 8), 16, False),
        ((64, 8), 16, False),
    ],
)
def test_the_published_re_index_is_not_always_a_permutation(
    heads: tuple[int, int], cp: int, permutes: bool
) -> None:
    """Ours always is, and is the published one where that is right."""
    problem = layer(heads, cp)
    taken = published_heads(problem, cp)
    assert permutes is (sorted(h for stage in taken for h in stage) == list(range(heads[0])))
    ours = upipe.head_stages(problem, cp, cp)
    assert problem.all_heads == sum(rank for stage in ours for rank in stage)
    same = taken == [[h for rank in stage for h in members(rank)] for stage in ours]
    assert same is permutes


def test_a_plan_of_stages_that_are_no_permutation_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = layer((16, 8), 4)
    verify(strategy("upipe").plan(problem, Direction.FORWARD))
    monkeypatch.setattr(upipe, "head_stages", published_stages)
    # Stage 2 takes head 4 that stage 0 had: it would be projected and attended twice.
    with pytest.raises(OverwriteError, match=r"q\[0\]h.* arrives, but chunk 0 is already there"):
        verify(strategy("upipe").plan(problem, Direction.FORWARD))


# 4. Contiguous rows of Wq meet the keys of other heads --------------------------------------------


def test_contiguous_rows_of_wq_pair_pretrained_heads_with_other_keys() -> None:
    """Stage s projects query heads s C .. s C + C - 1 and attends KV heads 0 .. C - 1 with them."""
    heads, kv_heads, cp = 16, 4, 4
    group = heads // kv_heads
    x, w_q, w_k = drawn(29, 11, seed=0), drawn(heads, 6, 11, seed=1), drawn(kv_heads, 6, 11, seed=2)
    v = drawn(kv_heads, 29, 5, seed=3)

    def attended(head: int, kv: int) -> Values:
        return partial(x @ w_q[head].T, x @ w_k[kv].T, v[kv])[0]

    right = torch.stack([attended(h, h // group) for h in range(heads)])
    slots = [(stage * cp + slot, slot) for stage in range(heads // cp) for slot in range(cp)]
    wrong = torch.stack([attended(head, kv) for head, kv in slots])
    paired = {head for head, kv in slots if kv == head // group}
    assert paired == {0, 5, 10, 15}
    for head in range(heads):
        same = torch.equal(wrong[head], right[head])
        assert same is (head in paired)
    assert (wrong - right).abs().max() > 0.5
    # Ours takes the rows of each KV head's own queries.
    for stage in upipe.head_stages(layer((heads, kv_heads), cp), cp, cp):
        for kv, taken in enumerate(stage):
            assert [head // group for head in members(taken)] == [kv]


def test_a_tile_of_queries_with_the_keys_of_other_heads_is_caught() -> None:
    plan = strategy("upipe").plan(layer((8, 4), 4), Direction.FORWARD)
    at, tile = first_tile(plan)
    q = tile.reads[0]._replace(heads=tile.reads[0].heads << plan.problem.group)
    with pytest.raises(MisfitError, match="cover its queries, keys and heads"):
        verify(changed(plan, at, replace(tile, reads=(q, *tile.reads[1:]))))


def first_tile(plan: Plan) -> tuple[int, Tile]:
    return next((at, task) for at, task in enumerate(plan.tasks) if isinstance(task, Tile))

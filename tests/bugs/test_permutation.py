"""The order of tokens: what is cut apart is put together, and positions follow the tokens."""

import pytest
import torch

from harness.attention import context_parallel, run_all
from harness.execute.shards import shard, unshard
from harness.oracle.tolerance import FLOAT64_LIMIT
from harness.plan.sharding import Sharding, contiguous, split, stripe, zigzag
from tests.support import EVERY_STRATEGY, problem, ranks, tensors


def batched(items: list[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(items[at : at + size]) for at in range(0, len(items), size)]


PLACEMENTS = {
    "contiguous": contiguous,
    "zigzag": zigzag,
    "stripe": stripe,
    "remapped": lambda seqlen, cp: Sharding(
        split(seqlen, 3 * cp),
        tuple(batched([*range(1, 3 * cp, 2), *range(0, 3 * cp, 2)], 3)),
    ),
}


def shardings() -> list[tuple[str, Sharding]]:
    sizes = [(1, 2), (7, 2), (23, 4), (64, 8), (3, 8)]
    return [
        (f"{name} of {seqlen} on {cp}", make(seqlen, cp))
        for name, make in PLACEMENTS.items()
        for seqlen, cp in sizes
    ]


@pytest.mark.parametrize(("name", "sharding"), shardings(), ids=lambda x: x if str(x) == x else "")
def test_b070_unshard_undoes_shard(name: str, sharding: Sharding) -> None:
    tokens = sum(map(len, sharding.chunks))
    whole = torch.arange(2.0 * 3 * tokens * 5).reshape(2, 3, tokens, 5)
    parts = [shard(whole, sharding, rank) for rank in range(len(sharding.owned))]
    assert torch.equal(unshard(parts, sharding), whole), name
    for rank, part in enumerate(parts):
        assert torch.equal(part, whole[:, :, sharding.positions(rank)])


def test_b070_putting_parts_side_by_side_is_not_unshard() -> None:
    whole = torch.arange(8.0).reshape(1, 1, 8, 1)
    parts = [shard(whole, zigzag(8, 2), rank) for rank in range(2)]
    assert torch.cat(parts, dim=2).flatten().tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert torch.equal(unshard(parts, zigzag(8, 2)), whole)


def targets(seqlen: int, strategy: str) -> list[tuple[list[int], list[int]]]:
    """On a rank: its tokens, and the next token of each, both sharded."""
    cp = context_parallel(seqlen=seqlen, heads_q=4, strategy=strategy)
    tokens = torch.arange(seqlen)[None]
    following = torch.cat([tokens[:, 1:], torch.full((1, 1), -1)], dim=1)
    assert torch.equal(cp.unshard(cp.shard(tokens, dim=1), dim=1), tokens)
    return [(cp.shard(tokens, dim=1)[0].tolist(), cp.shard(following, dim=1)[0].tolist())]


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_b010_labels_that_are_shifted_before_they_are_sharded_fit_their_tokens(
    strategy: str,
) -> None:
    seen = []
    for ((tokens, following),) in ranks(2).run(targets, 17, strategy):
        assert following == [token + 1 if token < 16 else -1 for token in tokens]
        seen += tokens
    assert sorted(seen) == list(range(17))


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_b070_results_come_back_in_the_order_of_the_inputs(strategy: str) -> None:
    p = problem("window:left=0,right=0", 23, (4, 4), dims=(8, 8), cp=4)
    q, k, v, dout = tensors(p)
    results = run_all(p, strategy, q, k, v, dout=dout).results
    # A weight of exactly 1 is e^(s - lse), and some processors compute s in two ways.
    assert (results["out"] - v).abs().max() <= FLOAT64_LIMIT
    assert (results["dv"] - dout).abs().max() <= FLOAT64_LIMIT

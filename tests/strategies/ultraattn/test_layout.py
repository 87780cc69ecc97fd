"""Who owns what: the layouts that are tried for a problem."""

import pytest

from harness.plan.problem import Problem
from harness.plan.sharding import Sharding, zigzag
from patterns import make_pattern
from strategies.ultraattn.layout import by_rank, layouts

NODES, GPUS = 2, 3


def tried(pattern: str, heads_kv: int, *, nodes: int = NODES) -> list[list[list[int]]]:
    """Return the owned tokens of every layout that has an order of its own."""
    p = Problem(
        pattern=make_pattern(pattern, 241),
        heads_q=6,
        heads_kv=heads_kv,
        head_dim=8,
        cp=nodes * GPUS,
    )
    found = [each for each in layouts(p, nodes, GPUS, remap=True) if each.order]
    return [owned(by_rank(each.queries, nodes, GPUS), nodes * GPUS) for each in found]


def owned(sharding: Sharding, ranks: int) -> list[list[int]]:
    """Return every rank's tokens."""
    return [sharding.positions(rank) for rank in range(ranks)]


def dealt(nodes: int = NODES) -> list[list[int]]:
    return owned(zigzag(241, nodes * GPUS), nodes * GPUS)


@pytest.mark.parametrize("pattern", ["causal", "causal:align=bottom_right"])
def test_ranks_of_several_nodes_get_head_and_tail_where_keys_are_lighter(pattern: str) -> None:
    """Then they are as busy as one another and send no queries, the heavier where heads share."""
    assert dealt() in tried(pattern, 2)


@pytest.mark.parametrize(
    ("pattern", "heads_kv", "nodes"), [("causal", 6, 2), ("full", 2, 2), ("causal", 2, 1)]
)
def test_not_where_keys_weigh_as_much_or_rows_are_even_or_a_node_is_alone(
    pattern: str, heads_kv: int, nodes: int
) -> None:
    assert dealt(nodes) not in tried(pattern, heads_kv, nodes=nodes)

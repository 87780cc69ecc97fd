"""The rule that a tiling's report names is the one by which its value and loads come out."""

from math import ceil

import pytest

from harness.plan.problem import Direction, Dtype, Problem
from patterns import make_pattern
from strategies.ultraattn.layout import layouts
from strategies.ultraattn.nodes import Effort, Nodes, Rules, Slack, TwoLevels, tile_nodes
from strategies.ultraattn.report import tilings_report

TOKENS = 1027


def tiled(cp: int, nodes: int, direction: Direction, *, published: bool) -> TwoLevels:
    p = Problem(
        pattern=make_pattern("causal", TOKENS),
        heads_q=6,
        heads_kv=2,
        head_dim=128,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )
    layout = next(iter(layouts(p, nodes, cp // nodes, remap=False)))
    return tile_nodes(
        p,
        direction,
        Nodes(nodes=nodes, gpus=cp // nodes, inside_speed=None if published else 9.0),
        (layout.queries, layout.keys),
        Rules(
            shipped=not published,
            slack=Slack(device=1, node=2) if published else Slack(),
            fix_diagonal=published,
        ),
        Effort(seconds=0.02),
    )


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("direction", list(Direction))
def test_counted_by_its_rule_a_tiling_comes_to_its_value(
    direction: Direction, published: bool
) -> None:
    """A to D of the paper, counted here from who attends which block."""
    found = tiled(5, 1, direction, published=published)
    (each,) = tilings_report(found, 10)["device"]
    rule, cells = each["rule"], found.allocation.cells
    ranks = range(5)
    q_owner, k_owner = (
        {chunk: rank for rank in ranks for chunk in side.owned[rank]}
        for side in (found.allocation.queries, found.allocation.keys)
    )
    rows = {(i, r) for i, row in enumerate(cells) for r in row if r is not None and q_owner[i] != r}
    columns = {
        (j, r) for row in cells for j, r in enumerate(row) if r is not None and k_owner[j] != r
    }

    def moved(rank: int, there: str, back: str) -> float:
        a, b = (sum(r == rank for _, r in side) for side in (rows, columns))
        c = sum(q_owner[i] == rank for i, _ in rows)
        d = sum(k_owner[j] == rank for j, _ in columns)
        amount: float = rule[f"row_{there}"] * a + rule[f"column_{there}"] * b
        return amount + rule[f"row_{back}"] * c + rule[f"column_{back}"] * d

    most = max(max(moved(r, "in", "out"), moved(r, "out", "in")) for r in ranks)
    assert each["value"] == pytest.approx(most)
    assert rule["counted"] == ("paper" if published else "shipped")
    # K and V are two thirds of Q, told to a quarter; float32 parts are twice as large.
    part, two = (1, 0.75) if published else (2, 1.25)
    if direction is Direction.FORWARD:
        assert [rule[w] for w in WEIGHTS] == [1, part, 0.75, 0]
    else:
        assert [rule[w] for w in WEIGHTS] == [2, part, 0.75, two]


WEIGHTS = ("row_in", "row_out", "column_in", "column_out")


@pytest.mark.parametrize("published", [True, False])
def test_loads_keep_the_cap_and_diagonals_are_where_it_says(published: bool) -> None:
    found = tiled(5, 1, Direction.FORWARD, published=published)
    (each,) = tilings_report(found, 10)["device"]
    instance, cells = found.blocks[0][0], found.allocation.cells
    loads = [0.0] * 5
    for i, row in enumerate(cells):
        for j, rank in enumerate(row):
            if rank is not None:
                loads[rank] += 0.5 if i == j else 1.0  # blocks of a causal pattern
    even = ceil(sum(loads) / 5)
    assert max(loads) <= even + each["rule"]["slack_blocks"]
    assert each["rule"]["slack_blocks"] == (0.5 if published else 0)
    assert each["rule"]["diagonal_fixed"] == published
    if published:
        assert all(cells[i][i] == instance.row_owner[i] for i in range(len(cells)))


@pytest.mark.parametrize("published", [True, False])
def test_chunks_are_shares_of_the_queries(published: bool) -> None:
    found = tiled(6, 3, Direction.FORWARD, published=published)
    said = tilings_report(found, 7 * TOKENS)
    fine = len(found.allocation.queries.chunks)
    assert said["node"]["chunk_bytes"] == 7 * TOKENS / 3
    assert {each["chunk_bytes"] for each in said["device"]} == {7 * TOKENS / fine}
    assert said["node"]["rule"]["inside"] is not published
    assert said["node"]["rule"]["slack_blocks"] == (1 if published else 0)
    assert not any(each["rule"]["inside"] for each in said["device"])


def test_rows_at_their_owners_have_no_cap_to_tell() -> None:
    p = Problem(pattern=make_pattern("causal", TOKENS), heads_q=6, heads_kv=2, head_dim=8, cp=3)
    layout = next(iter(layouts(p, 1, 3, remap=False)))
    found = tile_nodes(
        p,
        Direction.FORWARD,
        Nodes(nodes=1, gpus=3),
        (layout.queries, layout.keys),
        Rules(levels=frozenset()),
        Effort(),
    )
    assert [each["rule"]["slack_blocks"] for each in tilings_report(found, 1)["device"]] == [None]
    assert tilings_report(None, 1) == {"allocation": "row owner"}

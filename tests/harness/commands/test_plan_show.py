"""What `plan` prints as a table, at any width of the terminal."""

import io
import re
from itertools import pairwise

import pytest
from rich.console import Console

from harness.commands.plan_show import print_blocks
from harness.plan.block_table import block_table, rank_accounts
from harness.plan.plan import Plan
from harness.plan.problem import Direction
from strategies import strategy
from tests.support import problem


def printed(plan: Plan, width: int) -> list[str]:
    file = io.StringIO()
    print_blocks(plan, Console(file=file, width=width))
    return file.getvalue().splitlines()


def read(lines: list[str], corner: str) -> dict[str, list[str]]:
    """Join the bands of a table: each label and its cells, in the order of columns."""
    found: dict[str, list[str]] = {}
    inside = False
    for line in lines:
        words = re.split(r" {2,}", line.strip()) if corner == "rank" else line.split()
        if words and words[0] == corner:
            inside = True
        if not words or words[0].endswith(":") or len(words) < 2:
            inside = False
        if inside:
            at = 2 if len(words) > 2 and words[1].startswith("@") else 1
            found.setdefault(" ".join(words[:at]), []).extend(words[at:])
    return found


@pytest.mark.parametrize("width", [5, 20, 53, 80, 1000])
@pytest.mark.parametrize(
    ("text", "cp"), [("ring", 13), ("zigzag", 3), ("ulysses", 2), ("ring", 1), ("owner", 64)]
)
def test_all_blocks_are_shown_with_their_whole_ranks_at_any_width(
    text: str, cp: int, width: int
) -> None:
    pattern = "window:left=9,right=2" if text == "owner" else "causal"
    plan = strategy(text).plan(problem(pattern, 131, (6, 2), cp=cp), Direction.FORWARD)
    table = block_table(plan)
    lines = printed(plan, width)
    end = next(
        at for at, line in enumerate(lines) if line.startswith("k and" if width > 5 else "k")
    )
    found = read(lines[:end], "k")
    assert found["k"] == [str(at) for at in range(len(table.column_owner))]
    assert found["@"] == [str(owner) for owner in table.column_owner]
    for i, row in enumerate(table.ranks):
        assert found[f"q{i} @{table.row_owner[i]}"] == [
            "." if not ranks else str(ranks[0]) if len(ranks) == 1 else "+" for ranks in row
        ]
    blocks = [line for line in lines[:end] if line]
    label = max(len(f"q{i} @{owner}") for i, owner in enumerate(table.row_owner))
    if width == 1000:
        ends = [match.end() for match in re.finditer(r"\d+", lines[0])]
        assert len({after - before for before, after in pairwise(ends)}) <= 1, "uneven columns"
    # No wider than the terminal, but for one column where not even that fits.
    column = 1 + max(len(str(len(table.column_owner) - 1)), len(str(cp - 1)))
    assert all(len(line) <= max(width, label + column) for line in blocks)
    assert len({len(line) for line in blocks[: 2 + len(table.ranks)]}) == 1, "columns do not align"


@pytest.mark.parametrize("width", [20, 41, 80])
def test_accounts_are_whole_at_any_width(width: int) -> None:
    plan = strategy("owner").plan(problem("causal", 131, (6, 2), cp=11), Direction.BACKWARD)
    lines = printed(plan, width)
    found = read(
        lines[next(at for at, line in enumerate(lines) if "rank " in line and " A" in line) :],
        "rank",
    )
    assert found["rank"] == ["A", "B", "C", "D", "received MiB", "sent MiB", "work / mean"]
    accounts = rank_accounts(plan, block_table(plan))
    for rank, each in enumerate(accounts):
        counts = [str(n) for n in (each.A, each.B, each.C, each.D)]
        assert found[str(rank)][:4] == counts
        assert found[str(rank)][4] == f"{each.received_bytes / 2**20:,.1f}"
        assert len(found[str(rank)]) == 7

"""Which rank attends each block of a plan, and what every rank needs and moves for that."""

from collections.abc import Sequence
from dataclasses import dataclass

from harness.plan.plan import Plan
from harness.plan.sizes import traffic
from harness.plan.tasks import Tensor, Tile


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """A plan as a table of blocks.

    Attributes:
        ranks: Per query chunk, per key chunk: the ranks that attend some of it, for some heads.
        row_owner: Rank that owns each query chunk.
        column_owner: Rank that owns each key chunk.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    row_owner: tuple[int | None, ...]
    column_owner: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAccount:
    """Work, needs and traffic of one rank.

    Attributes:
        A: Query chunks that it attends and does not own.
        B: Key chunks likewise.
        C: Copies of its own query chunks that others attend.
        D: Copies of its own key chunks likewise.
        received_bytes: Bytes that it receives from other ranks.
        sent_bytes: Bytes that it sends to other ranks.
        area: Pairs that it attends, over all heads.
    """

    A: int
    B: int
    C: int
    D: int
    received_bytes: int
    sent_bytes: int
    area: int


def block_table(plan: Plan) -> BlockTable:
    """Return who attends which block; raises nothing, whatever the plan."""
    found: list[list[set[int]]] = [[set() for _ in plan.kv_chunks] for _ in plan.q_chunks]
    areas = plan.problem.pattern.areas(plan.q_chunks, plan.kv_chunks)
    for task in plan.tasks:
        if isinstance(task, Tile):
            for i in task.q:
                for j in task.kv:
                    if areas[i, j]:
                        found[i][j].add(task.place.rank)
    return BlockTable(
        ranks=tuple(tuple(tuple(sorted(ranks)) for ranks in row) for row in found),
        row_owner=_owners(plan, Tensor.Q, len(plan.q_chunks)),
        column_owner=_owners(plan, Tensor.K, len(plan.kv_chunks)),
    )


def _owners(plan: Plan, tensor: Tensor, count: int) -> tuple[int | None, ...]:
    owners: list[int | None] = [None] * count
    for place, piece in plan.initial:
        if piece.tensor is tensor:
            for chunk in piece.chunks:
                owners[chunk] = place.rank
    return tuple(owners)


def rank_accounts(plan: Plan, table: BlockTable) -> tuple[RankAccount, ...]:
    """Return the account of every rank; A to D as UltraAttn's Table 2 defines them."""
    cp = plan.problem.cp
    sent, received = traffic(plan)
    area = [0] * cp
    for task in plan.tasks:
        if isinstance(task, Tile):
            area[task.place.rank] += task.area * task.heads.bit_count()
    columns = tuple(zip(*table.ranks, strict=True)) if table.ranks else ()
    rows_away, rows_lent = _away(table.ranks, table.row_owner, cp)
    columns_away, columns_lent = _away(columns, table.column_owner, cp)
    return tuple(
        RankAccount(
            A=rows_away[r],
            B=columns_away[r],
            C=rows_lent[r],
            D=columns_lent[r],
            received_bytes=received[r],
            sent_bytes=sent[r],
            area=area[r],
        )
        for r in range(cp)
    )


def _away(
    lines: Sequence[Sequence[tuple[int, ...]]], owners: Sequence[int | None], cp: int
) -> tuple[list[int], list[int]]:
    """Count chunks that ranks attend and do not own, and copies of theirs that others attend."""
    away, lent = [0] * cp, [0] * cp
    for line, owner in zip(lines, owners, strict=True):
        for rank in {rank for cell in line for rank in cell} - {owner}:
            away[rank] += 1
            if owner is not None:
                lent[owner] += 1
    return away, lent

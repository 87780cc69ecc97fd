"""A plan as a figure: which rank attends which block, and who sends how much to whom.

The left half is the tiling of a block table as UltraAttn's figure 4 draws it: a colour and a number
for each rank. The right half has senders as rows and receivers as columns.
"""

from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.ticker import MaxNLocator

from harness.page.groups import Chart, slug
from harness.page.svg import COLORS, drawing, new_figure, svg_of
from harness.plan.block_table import BlockTable, block_table
from harness.plan.plan import Plan
from harness.plan.sizes import sent_bytes
from harness.plan.tasks import legs_of

_MIB = 2**20
_NUMBERED = 24
"""Blocks a side up to which each has its rank's number."""
_PLAIN = "#888888"


def plan_chart(plan: Plan, *, what: str) -> Chart:
    """Draw a plan.

    Args:
        plan: A proved plan.
        what: Its title.
    """
    table, sent = block_table(plan), bytes_between(plan) / _MIB
    key = f"plan-{slug(what)}"
    with drawing():
        figure = new_figure(9.0, 4.4)
        blocks, moves = figure.subplots(1, 2)
        _blocks(blocks, table, plan.problem.cp)
        _moves(figure, moves, sent)
        busiest = int(sent.sum(axis=1).argmax())
        summary = (
            f"{len(plan.q_chunks)} by {len(plan.kv_chunks)} chunks on {plan.problem.cp} ranks; "
            f"{sent.sum():.1f} MiB move, rank {busiest} sends most, {sent[busiest].sum():.1f} MiB"
        )
        svg = svg_of(figure, key, what, summary)
    note = f"{summary}. +: several ranks share the heads of a block; white: no pair is allowed."
    return Chart(key, what, note, svg)


def bytes_between(plan: Plan) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Bytes that each rank sends to each other one: senders are rows."""
    found = np.zeros((plan.problem.cp, plan.problem.cp))
    for task in plan.tasks:
        for leg in legs_of(task):
            found[leg.src.rank, leg.dst.rank] += sent_bytes(plan, leg)
    return found


def _blocks(
    panel: Any,  # noqa: ANN401  # matplotlib's axes have no types
    table: BlockTable,
    cp: int,
) -> None:
    shades = np.ones((len(table.ranks), len(table.ranks[0]), 3))
    for row, cells in enumerate(table.ranks):
        for column, ranks in enumerate(cells):
            if ranks:
                shades[row, column] = _color(ranks[0], cp) if len(ranks) == 1 else to_rgb(_PLAIN)
    panel.imshow(shades, interpolation="nearest", aspect="auto")
    if max(shades.shape[:2]) <= _NUMBERED:
        for row, cells in enumerate(table.ranks):
            for column, ranks in enumerate(cells):
                text = "" if not ranks else str(ranks[0]) if len(ranks) == 1 else "+"
                panel.text(column, row, text, ha="center", va="center", color="black", fontsize=7)
    shared = any(len(ranks) > 1 for cells in table.ranks for ranks in cells)
    panel.set_title("rank of each block" + (" (+: several share its heads)" if shared else ""))
    panel.set_xlabel("chunks of keys")
    panel.set_ylabel("chunks of queries")
    _whole_numbers(panel)


def _moves(
    figure: Any,  # noqa: ANN401
    panel: Any,  # noqa: ANN401
    sent: "np.ndarray[Any, np.dtype[np.float64]]",
) -> None:
    cells = ListedColormap([_mixed(share / 255) for share in range(256)])
    image = panel.imshow(sent, interpolation="nearest", aspect="auto", cmap=cells, vmin=0)
    panel.set_title("MiB sent")
    panel.set_xlabel("receiver")
    panel.set_ylabel("sender")
    _whole_numbers(panel)
    figure.colorbar(image, ax=panel, shrink=0.8)


def _whole_numbers(panel: Any) -> None:  # noqa: ANN401
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.yaxis.set_major_locator(MaxNLocator(integer=True))


def _mixed(share: float) -> tuple[float, ...]:
    """From white to the first colour."""
    return tuple(1 - share * (1 - part) for part in to_rgb(COLORS[0]))


def _color(rank: int, cp: int) -> tuple[float, ...]:
    """Colours of ranks: eight, then lighter ones of the same."""
    own = to_rgb(COLORS[rank % len(COLORS)])
    turns = -(-cp // len(COLORS))
    lighter = 0.25 + 0.5 * (rank // len(COLORS)) / turns
    return tuple(part + (1 - part) * lighter for part in own)

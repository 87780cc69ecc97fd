"""A plan as a table of blocks coloured by rank, with every rank's account; and its levels."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from harness.blocks import block_table, rank_accounts
from harness.plan import Plan

_MIB = 2**20
_COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan", "bright_red", "bright_green")
_KEY = "q3 @1: query chunk 3 of rank 1; a number: the rank that attends the block; .: nothing is"
_KEY += " allowed there; +: its heads are spread over several ranks"
_LEGEND = (
    "A, B: query and key chunks that a rank attends and does not own; C, D: copies of its own that "
    "others attend"
)


def print_blocks(plan: Plan, console: Console) -> None:
    """Print who attends which block, then what each rank needs and moves.

    Rows are query chunks, columns key chunks, both in token order of the plan; a dot is a block in
    which nothing is allowed, a plus one whose heads are spread over several ranks.
    """
    table = block_table(plan)
    width = len(str(plan.problem.cp - 1)) + 1
    lines = [Text("".rjust(6) + " keys, at their owners: " + _owners(table.column_owner))]
    for i, row in enumerate(table.ranks):
        line = Text(f"q{i} @{table.row_owner[i]}".rjust(8) + " ")
        for ranks in row:
            if not ranks:
                line.append(".".rjust(width), style="dim")
            elif len(ranks) == 1:
                line.append(str(ranks[0]).rjust(width), style=_COLOURS[ranks[0] % len(_COLOURS)])
            else:
                line.append("+".rjust(width))
        lines.append(line)
    for line in lines:
        console.print(line, no_wrap=True, overflow="crop", crop=True)
    console.print(_KEY, style="dim")
    console.print()
    console.print(_accounts(plan))
    console.print(_LEGEND, style="dim")


def _owners(owners: tuple[int | None, ...]) -> str:
    return " ".join("-" if owner is None else str(owner) for owner in owners)


def _accounts(plan: Plan) -> Table:
    found = rank_accounts(plan, block_table(plan))
    mean = sum(each.area for each in found) / len(found) or 1.0
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "A", "B", "C", "D", "received MiB", "sent MiB", "work / mean"):
        table.add_column(name, justify="right")
    for rank, each in enumerate(found):
        counts = (str(n) for n in (rank, each.A, each.B, each.C, each.D))
        sizes = (f"{size / _MIB:,.1f}" for size in (each.received_bytes, each.sent_bytes))
        table.add_row(*counts, *sizes, f"{each.area / mean:.3f}")
    return table


def level_lines(levels: Mapping[str, Any]) -> str:
    """A line per tiling and schedule: value, bound, gap, what settled it."""
    lines = []
    node, device = levels.get("node"), levels.get("device", ())
    for name, each in [("nodes", node), *(("devices", block) for block in device)]:
        if each is not None:
            lines.append(
                f"{name:<13} {each['blocks']} blocks on {each['devices']}: at most "
                f"{each['value']:g} chunks, bound {each['bound']:g}, gap {each['gap']:.1%} "
                f"({each['status']}, {each['source']}, {each['seconds']:.1f} s)"
            )
    if levels.get("allocation") == "row owner":
        lines.append("tilings       none found that beats blocks at their rows' owners")
    if levels.get("fallback"):
        lines.append(f"fallback      {levels['fallback']}")
    remap = levels.get("remap", {})
    if remap.get("order"):
        lines.append(f"remap         {' '.join(map(str, remap['order']))}")
    if remap.get("placement"):
        lines.append(f"remap         tokens dealt as a {remap['placement']}")
    if "kernel" in levels:
        lines.append(f"kernels       {levels['kernel']['kept']} replacements")
    if "schedule" in levels:
        each = levels["schedule"]
        lines.append(
            f"schedule      {each['makespan_s'] * 1e3:.3f} ms, "
            f"bound of these tasks in any order {each['bound_s'] * 1e3:.3f} ms, "
            f"gap {each['gap']:.1%} ({each['source']}, {each['seconds']:.1f} s)"
        )
    if levels.get("refined") is False:
        lines.append("refined       no: fused and scheduled it would take no less")
    if "made_for" in levels:
        lines.append(f"made for      {levels['made_for']}")
    return "".join(f"{line}\n" for line in lines)

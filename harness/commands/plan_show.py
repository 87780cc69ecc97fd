"""A plan as a table of blocks coloured by rank, with every rank's account."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from harness.plan.block_table import block_table, rank_accounts
from harness.plan.plan import Plan

_MIB = 2**20
_GAP = "  "
_COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan", "bright_red", "bright_green")
_KEY = (
    "k and q: chunks of keys and queries; @: the rank that owns one; a number: the rank that "
    "attends the block; .: the pattern allows no pair there; +: several ranks share its heads"
)
_LEGEND = (
    "A, B: query and key chunks that a rank attends and does not own; C, D: copies of its own "
    "chunks that others attend"
)
_ACCOUNTS = ("rank", "A", "B", "C", "D", "received MiB", "sent MiB", "work / mean")

Line = tuple[Text, Sequence[Text]]
"""A line of a table: its label and its cells."""


def print_blocks(plan: Plan, console: Console) -> None:
    """Print who attends which block, then what each rank needs and moves.

    Rows are query chunks, columns key chunks, both in token order of the plan; a dot is a block in
    which nothing is allowed, a plus one whose heads are spread over several ranks. Columns that do
    not fit stand below the others.
    """
    _print(_blocks(plan), " ", console)
    console.print(_KEY, style="dim")
    console.print()
    _print(_accounts(plan), _GAP, console)
    console.print(_LEGEND, style="dim")


def _blocks(plan: Plan) -> list[Line]:
    table = block_table(plan)
    chunks = len(table.column_owner)
    width = max(len(str(chunks - 1)), len(str(plan.problem.cp - 1)))
    lines: list[Line] = [
        (Text("k"), [Text(str(chunk).rjust(width)) for chunk in range(chunks)]),
        (Text("@"), [Text(_owner(owner)) for owner in table.column_owner]),
    ]
    for i, row in enumerate(table.ranks):
        lines.append((Text(f"q{i} @{_owner(table.row_owner[i])}"), list(map(_cell, row))))
    return lines


def _owner(rank: int | None) -> str:
    return "-" if rank is None else str(rank)


def _cell(ranks: Sequence[int]) -> Text:
    if not ranks:
        return Text(".", style="dim")
    if len(ranks) > 1:
        return Text("+")
    return Text(str(ranks[0]), style=_COLOURS[ranks[0] % len(_COLOURS)])


def _accounts(plan: Plan) -> list[Line]:
    found = rank_accounts(plan, block_table(plan))
    mean = sum(each.area for each in found) / len(found) or 1.0
    rows: list[Sequence[str]] = [_ACCOUNTS]
    for rank, each in enumerate(found):
        counts = [str(n) for n in (rank, each.A, each.B, each.C, each.D)]
        sizes = [f"{size / _MIB:,.1f}" for size in (each.received_bytes, each.sent_bytes)]
        rows.append([*counts, *sizes, f"{each.area / mean:.3f}"])
    styles = ["bold"] + [""] * len(found)
    lines: list[Line] = []
    for row, style in zip(rows, styles, strict=True):
        label, *cells = [Text(cell, style=style) for cell in row]
        lines.append((label, cells))
    return lines


def _print(lines: Sequence[Line], gap: str, console: Console) -> None:
    """Print a table in bands of whole columns that fit, each with the labels of its lines."""
    label = max(len(label) for label, _ in lines)
    cells = [[len(cell) for cell in row] for _, row in lines]
    widths = [max(column) for column in zip(*cells, strict=True)]
    left = console.width - label
    for number, band in enumerate(_bands([len(gap) + width for width in widths], left)):
        if number:
            console.print()
        for name, row in lines:
            line = Text(" " * (label - len(name))) + name
            for at in band:
                line.append(gap + " " * (widths[at] - len(row[at]))).append_text(row[at])
            console.print(line, no_wrap=True, overflow="ignore", crop=False)


def _bands(widths: Sequence[int], room: int) -> Iterator[range]:
    """Split columns into runs that fit in so much room, of one column at least."""
    start, used = 0, 0
    for at, width in enumerate(widths):
        if at > start and used + width > room:
            yield range(start, at)
            start, used = at, 0
        used += width
    yield range(start, len(widths))

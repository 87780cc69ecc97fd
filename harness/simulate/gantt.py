"""Traces as text: a line per rank and stream, time from left to right."""

from textwrap import wrap

from harness.simulate.queues import Stream
from harness.simulate.trace import TILE, Span, Trace

_GLYPHS = {TILE: "█", "linear": "█", "copy": "▒", "launch": "▒", "transfer": "━"}
_COLLECTIVE_GLYPH, _OTHER_GLYPH, _PARTLY = "═", "▓", "·"
_KEY = {
    "█": "attends or multiplies",
    "▓": "merges or finishes",
    "━": "transfers",
    "═": "collective",
    "▒": "copies or launches",
    "·": "busy for less than half of the sign's time",
}
_MIN_COLUMNS = 8
_NOTHING = 1e-9  # of a cell: what rounding leaves over


def gantt(trace: Trace, width: int = 80, ranks: int = 8, *, what: str = "") -> str:
    """Draw a trace as text: a line per rank and stream, time from left to right.

    A cell shows what its stream does for most of the cell's time; a key says which sign is what.

    Args:
        trace: The trace to draw.
        width: Columns of a line.
        ranks: How many ranks to draw, from rank 0.
        what: Names what ran in the heading; by default the strategy, its direction and degree.
    """
    names = [stream for stream in Stream if any(span.stream is stream for span in trace.spans)]
    gutter = 5 + max((len(stream.value) for stream in names), default=0)
    columns = max(_MIN_COLUMNS, width - gutter - 1)
    rows: dict[tuple[int, Stream], list[Span]] = {}
    for span in trace.spans:
        if span.rank < ranks and span.end_s > span.start_s:
            rows.setdefault((span.rank, span.stream), []).append(span)
    what = what or f"{trace.strategy} {trace.direction} cp={trace.cp}"
    lines = wrap(what, width)
    lines += wrap(f"on {trace.machine}: {trace.makespan_s * 1e3:.3f} ms", width)
    drawn: set[str] = set()
    previous = None
    for rank, stream in sorted(rows, key=lambda key: (key[0], names.index(key[1]))):
        head = f"{rank:>4} " if rank != previous else "     "
        previous = rank
        bar = _bar(rows[rank, stream], trace.makespan_s / columns, columns)
        drawn.update(bar)
        lines.append(f"{head}{stream.value:<{gutter - 5}} {bar}".rstrip())
    if trace.cp > ranks:
        lines.append(f"     ({trace.cp - ranks} more ranks)")
    key = ", ".join(f"{sign} {meaning}" for sign, meaning in _KEY.items() if sign in drawn)
    source = trace.source.value
    known = source if trace.calibration == source else f"{source}; {trace.calibration}"
    return "\n".join([*lines, *wrap(f"{key}; {known}" if key else known, width)])


def _bar(spans: list[Span], cell_s: float, columns: int) -> str:
    shares: list[dict[str, float]] = [{} for _ in range(columns)]
    for span in spans:
        first, last = (min(int(t / cell_s), columns - 1) for t in (span.start_s, span.end_s))
        for column in range(first, last + 1):
            covered = min(span.end_s, (column + 1) * cell_s) - max(span.start_s, column * cell_s)
            if covered > cell_s * _NOTHING:
                shares[column][span.kind] = shares[column].get(span.kind, 0.0) + covered
    return "".join(_cell(share, cell_s) for share in shares)


def _cell(share: dict[str, float], cell_s: float) -> str:
    if not share:
        return " "
    if sum(share.values()) < cell_s / 2:
        return _PARTLY
    kind = max(share, key=lambda name: (share[name], name))
    collective = "_" in kind
    return _GLYPHS.get(kind, _COLLECTIVE_GLYPH if collective else _OTHER_GLYPH)

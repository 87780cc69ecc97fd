"""The terms of a plan's time as text: a line each, and bars that begin where the one above ends."""

import textwrap

from harness.report.format import milliseconds
from harness.simulate.time_terms import TimeTerms

_NAME, _FIGURES = 13, 16
_LEAST_BAR = 8


def terms_text(terms: TimeTerms, machine: str, width: int) -> str:
    """Return the time of a plan, what it is beside two bounds, and its terms as a stacked bar.

    Args:
        terms: The terms.
        machine: Name of the cluster.
        width: Columns.
    """
    time_s, even_s = terms.time_s, terms.even_s
    times = f", {time_s / even_s:.2f}× even compute" if even_s else ""
    least = terms.any_plan
    said = (
        f"{'time':<{_NAME}} {milliseconds(time_s)} ms on {machine}{times}; no plan takes less than "
        f"{milliseconds(least.bound_s)} ms ({least.what})"
    )
    lines = textwrap.wrap(said, width, subsequent_indent="  ", drop_whitespace=True)
    room = max(width - _NAME - _FIGURES, _LEAST_BAR)
    before_s = 0.0
    for name, seconds in terms.parts.items():
        share = seconds / time_s if time_s else 0.0
        bar = _bar(before_s, seconds, time_s, room)
        lines.append(
            f"  {name:<{_NAME - 1}}{milliseconds(seconds):>7} {share:>5.1%} {bar}".rstrip()
        )
        before_s += seconds
    return "\n".join(lines)


def _bar(before_s: float, seconds: float, all_s: float, room: int) -> str:
    """A bar from where the others end; of what is too short to see, nothing."""
    if not all_s:
        return ""
    start, stop = (round(room * max(0.0, each) / all_s) for each in (before_s, before_s + seconds))
    return " " * min(start, stop) + "█" * (stop - start)

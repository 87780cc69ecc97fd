"""Figures of matplotlib as SVG that lives inside a page: themed by its colours, read by all.

Ink is the page's own colour, so that a figure follows a light or a dark theme; series differ by
marker, dashes or hatches as well as by colour, so that they can be told apart in grey.
"""

import re
from contextlib import AbstractContextManager
from io import StringIO
from typing import Any

from markupsafe import escape
from matplotlib import rc_context
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

INK = "#010203"
"""Stands for the colour of the text around a figure."""
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#a0522d")
"""Okabe and Ito's colours, which the colour-blind can tell apart too, but for yellow; two more."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)), (0, (7, 3)))
HATCHES = ("", "///", "\\\\\\", "...", "xxx", "---", "+++", "ooo")

_RC: dict[Any, Any] = {  # matplotlib names its keys one by one
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#888888",
    "grid.alpha": 0.35,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "hatch.linewidth": 0.6,
    "hatch.color": INK,
}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches; draw into it inside `drawing()`."""
    return Figure(figsize=(width, height), layout="constrained")


def drawing() -> AbstractContextManager[None]:
    """The settings under which figures are drawn, for a `with` statement."""
    return rc_context(_RC)


def plain_log(axis: Axis) -> None:
    """Number a log axis at 1, 2 and 5 of each decade, as plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def svg_of(figure: Figure, key: str, title: str, summary: str) -> str:
    """Write a figure as an SVG element.

    Args:
        figure: Drawn inside `drawing()`.
        key: A name that no other figure of the page has.
        title: Its name, for who cannot see it.
        summary: What it shows, in a sentence or two, for the same.
    """
    file = StringIO()
    with rc_context({**_RC, "svg.hashsalt": key}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = _own_ids(text, key).replace(INK, "currentColor")
    head, rest = text.split(">", 1)
    head = re.sub(r'\s(width|height|version|xmlns:xlink)="[^"]*"', "", head)
    head = head.replace("xlink:", "")
    named = f"<title>{escape(title)}</title><desc>{escape(summary)}</desc>"
    label = escape(f"{title}. {summary}")
    return f'{head} role="img" aria-label="{label}">{named}{rest}'.replace("xlink:href", "href")


def _own_ids(text: str, key: str) -> str:
    """Drop ids that nothing refers to; give the others names of this figure."""
    used = {*re.findall(r'(?:href="#|url\(#)([^")]+)', text)}

    def renamed(match: "re.Match[str]") -> str:
        return f' id="{key}-{match[1]}"' if match[1] in used else ""

    text = re.sub(r'\sid="([^"]*)"', renamed, text)
    return re.sub(r'(href="#|url\(#)([^")]+)', rf"\g<1>{key}-\g<2>", text)

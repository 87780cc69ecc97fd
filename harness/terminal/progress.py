"""Output of a verb: tables on stdout, and live progress on stderr."""

import shutil
import sys
import time
from collections.abc import Iterable
from itertools import chain
from textwrap import wrap
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment
from rich.text import Text

from harness.base.text import printable

_LINE_S = 30.0
"""Between two lines where stderr is no terminal."""
_KNOWN = 0.1
"""Of the items: the time left is not told before, as some work begins with the dearest."""


def wrapped(text: str) -> str:
    """Wrap each line of a text to the terminal, or to `COLUMNS` in a pipe; words stay whole.

    What could act on the terminal is spelled out: names of files and of options come from anywhere.
    """
    text = printable(text)
    columns = shutil.get_terminal_size().columns
    lines = (
        wrap(
            line,
            columns,
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
        )
        if len(line) > columns
        else [line]
        for line in text.splitlines()
    )
    return "\n".join(chain.from_iterable(lines))


def say(*lines: str) -> None:
    """Print lines on stderr, where they do not mix with results."""
    for line in lines:
        print(wrapped(line), file=sys.stderr)


class Output(Console):
    """The console of stdout; a reader that leaves early is an exception like any other.

    What it shows comes from records, files and workers too: their control characters are spelled
    out.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render, but let only the console's own codes act on a terminal."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text, len(segment.text)), segment.style)

    def on_broken_pipe(self) -> None:
        """Let the command line see it: leaving early is no failure of the work."""
        raise  # noqa: PLE0704  # rich calls this from its handler


def _foreseen(done: float, total: float | None) -> bool:
    """Whether enough is done to say how long the rest will take."""
    return total is not None and done >= _KNOWN * total


class _Left(TimeRemainingColumn):
    """The time left, once it can be known."""

    def render(self, task: Task) -> Text:
        """Format it."""
        if task.finished or _foreseen(task.completed, task.total):
            return super().render(task)
        return Text("-:--:--", style="progress.remaining")


class Live:
    """Progress of some work: a bar with the time left, or a line now and then if no terminal.

    Use as a context manager.

    Args:
        name: Name of the work.
        total: How many items.
    """

    def __init__(self, name: str, total: int) -> None:
        self._name, self._total, self._done = name, total, 0
        self._begin = self._told = time.monotonic()
        terminal = sys.stderr.isatty()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _Left(elapsed_when_finished=True),
            console=Console(stderr=True),
            disable=not terminal or not total,
        )
        self._task = self._bar.add_task(name, total=total)
        self._lines = not terminal

    def __enter__(self) -> Self:
        """Show it."""
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leave the bar as it is."""
        self._bar.stop()

    def advance(self) -> None:
        """Count one item as done."""
        self._done += 1
        self._bar.advance(self._task)
        now = time.monotonic()
        if self._lines and now - self._told > _LINE_S:
            self._told = now
            left = (now - self._begin) / self._done * (self._total - self._done)
            text = f"{self._name}: {self._done} of {self._total}"
            if _foreseen(self._done, self._total):
                text += f", about {_clock(left)} left"
            print(text, file=sys.stderr, flush=True)

    def skip(self) -> None:
        """Take one item out of the count: it was done in an earlier run."""
        self._total -= 1
        self._bar.update(self._task, total=self._total)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"

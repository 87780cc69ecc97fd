"""Progress: how far work is, and how long the rest takes once that can be known."""

import re

import pytest
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from harness.terminal import progress
from harness.terminal.progress import Live, Output, wrapped


def test_the_time_left_is_not_guessed_of_the_first_few_cells(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dearest come first: 6 of 70 in 31 s once promised minutes for a run of one."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Live("check", 70) as live:
        for done in range(1, 21):
            now[0] = 31.0 * (1 + done // 20) if done >= 6 else 0.0
            live.advance()
    assert capsys.readouterr().err.splitlines() == [
        "check: 6 of 70",
        "check: 20 of 70, about 0:02:35 left",
    ]


def test_a_bar_shows_no_time_left_before_it_can_be_known() -> None:
    now = [0.0]
    bar = Progress(
        progress._Left(elapsed_when_finished=True),
        console=Console(),
        disable=True,
        get_time=lambda: now[0],
    )
    task = bar.add_task("check", total=70)
    shown = []
    for done in range(1, 71):
        now[0] = float(done)
        bar.advance(task)
        if done in (6, 7, 70):
            shown.append(progress._Left(elapsed_when_finished=True).render(bar.tasks[0]).plain)
    assert shown == ["-:--:--", "0:01:03", "0:01:10"]


def test_nothing_that_is_shown_acts_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in a table nor in a message: colours are the console's own."""
    foreign = "a\x1b]0;title\x07b \x9b2J \u202e \ud800"
    table = Table(title=foreign)
    table.add_column(foreign)
    table.add_row(foreign, style="bold")
    Output(force_terminal=True, width=200).print(table, foreign)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "a\\x1b]0;titleb \\x9b2J \\u202e \\ud800" in shown  # a bell is left out
    assert wrapped(foreign) == "a\\x1b]0;title\\x07b \\x9b2J \\u202e \\ud800"
    for text in (shown.replace("\n", ""), wrapped(foreign)):
        assert text.isprintable(), text
        text.encode()

"""Text from elsewhere: it is shown as what it is, in bounds, and acts on nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.base.text import one_line, printable, trace


@given(st.text(alphabet=st.characters(), max_size=80), st.integers(2, 60))
def test_any_text_becomes_printable_and_bounded(text: str, most: int) -> None:
    for shown in (printable(text, most), trace(text, most), one_line(text, most)):
        shown.encode()
        assert shown.replace("\n", "").replace("\t", "").isprintable()
        assert len(shown) <= 10 * most + 40
    line = one_line(text, most)
    assert "\n" not in line
    assert line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("\x1b[2J", "\\x1b[2J"),
        ("bell\x07, next line\x85, \ud800", "bell\\x07, next line\\x85, \\ud800"),
        ("turned \u202e", "turned \\u202e"),
        ("größer ≤ 1 × ∞", "größer ≤ 1 × ∞"),
    ],
)
def test_what_a_text_becomes(text: str, shown: str) -> None:
    assert printable(text) == trace(text) == shown


def test_a_line_is_the_first_that_says_something() -> None:
    assert one_line("\n \n  first \nsecond") == "first"
    assert one_line(" \n") == "(no text)"


def test_a_long_trace_keeps_its_ends() -> None:
    assert (
        trace("a" * 10 + "b" * 5 + "c" * 10, 20) == "a" * 10 + "[... 5 characters ...]" + "c" * 10
    )

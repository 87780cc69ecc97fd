"""Numbers as people type them: which are taken, and that all others are answered with the rule."""

import pytest

from harness.base.numbers import LARGEST_COUNT, positive, received, whole_number

NEVER = ["", " ", "²", "\u0661", "1_0", "+3", "-3", "3.0", "1e3", "0x10", "nan", "1 0", "9" * 5000]


@pytest.mark.parametrize(
    ("text", "number"), [("7", 7), (" 12 ", 12), ("007", 7), (str(LARGEST_COUNT), LARGEST_COUNT)]
)
def test_digits_are_a_whole_number(text: str, number: int) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize("text", [*NEVER, "0", "000", str(LARGEST_COUNT + 1)])
def test_anything_else_is_answered_with_the_rule(text: str) -> None:
    with pytest.raises(ValueError, match=f"of at least 1 and at most {LARGEST_COUNT}$"):
        whole_number(text)


def test_the_limit_is_the_one_given() -> None:
    assert whole_number("11", most=11) == 11
    with pytest.raises(ValueError, match=r"at most 11$"):
        whole_number("12", most=11)


@pytest.mark.parametrize(
    ("text", "number"), [("3", 3.0), ("0.5", 0.5), (".25", 0.25), ("5e5", 5e5), (" 1e-3 ", 1e-3)]
)
def test_positive_numbers_are_read(text: str, number: float) -> None:
    assert positive(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "²",
        "\u0661",
        "1_0",
        "-3",
        "0",
        "0.0",
        "1.1e12",
        "1e400",
        "inf",
        "nan",
        "1e",
        "9" * 5000,
    ],
)
def test_what_is_no_positive_number_is_answered_with_the_rule(text: str) -> None:
    with pytest.raises(ValueError, match=r"^must be a positive number and at most 1e12$"):
        positive(text)


def test_a_message_repeats_no_more_than_the_beginning_of_a_long_value() -> None:
    assert received("77") == "77"
    assert received("7" * 5000) == "7" * 24 + "..."

"""The list of public bugs: every row is tested here, or docs/public-bugs.md says why not."""

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "public-bugs.md").read_text()
ROWS = (HERE / "ids.txt").read_text().split()
NAME = re.compile(r"^def test_((?:[bs]\d+_)+)", re.MULTILINE)


def rows_with_tests() -> dict[str, set[str]]:
    """Per row, the files whose tests carry its name."""
    found: dict[str, set[str]] = {}
    for path in HERE.glob("test_*.py"):
        for name in NAME.findall(path.read_text()):
            for row in name.strip("_").upper().split("_"):
                found.setdefault(row, set()).add(path.name)
    return found


def table(title: str) -> dict[str, list[str]]:
    """The cells behind each row of one table of the page."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    lines = re.findall(r"^\| ([BS]\d+) \| (.*) \|$", section, re.MULTILINE)
    return {row: cells.split(" | ") for row, cells in lines}


def test_every_row_is_tested_or_listed_as_not_applicable() -> None:
    excused = set(table("Not applicable here"))
    assert len(ROWS) == len(set(ROWS)) == 66
    assert set(rows_with_tests()) & excused == set()
    assert set(rows_with_tests()) | excused == set(ROWS)


def test_the_page_names_the_files_in_which_a_row_is_tested() -> None:
    page = {
        row: set(re.findall(r"`(\w+\.py)`", cells[-1])) for row, cells in table("Tested").items()
    }
    assert page == rows_with_tests()


def test_every_row_that_is_not_applicable_has_a_reason() -> None:
    assert all(len(reason) > 40 for (reason,) in table("Not applicable here").values())

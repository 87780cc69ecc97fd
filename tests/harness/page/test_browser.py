"""The page in a real browser: no error, no request, tables that sort, nothing too wide."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.page.build import build_page
from tests.harness.page.test_build import some

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path")


@pytest.fixture
def browser() -> Iterator["Browser"]:
    with playwright.sync_playwright() as drivers:
        found = drivers.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


def test_a_page_works_at_three_widths_light_and_dark(browser: "Browser", tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(build_page(list(some())).html)
    for width, scheme in ((360, "light"), (900, "dark"), (1600, "light")):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        view, said, asked = context.new_page(), [], []
        view.on("console", lambda message, said=said: said.append(message.text))
        view.on("pageerror", lambda error, said=said: said.append(str(error)))
        view.on("request", lambda request, asked=asked: asked.append(request.url))
        view.goto(file.as_uri())
        assert (said, asked) == ([], [file.as_uri()])
        page_width, window = view.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert page_width <= window
        for figure in view.locator("figure svg").all():
            assert figure.is_visible()
            box = figure.bounding_box()
            assert box["width"] > 250
            assert box["height"] > 60
        context.close()


def test_tables_sort_and_filter(browser: "Browser", tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    records = list(some())
    file.write_text(build_page(records).html)
    view = browser.new_page()
    view.goto(file.as_uri())
    table = view.locator("#all-cells")
    at = table.locator("thead th").all_inner_texts().index("ms") + 1
    button = table.locator(f"thead th:nth-child({at}) button")
    for descending in (False, True):
        button.click()
        times = [float(t) for t in table.locator(f"tbody td:nth-child({at})").all_inner_texts()]
        assert times == sorted(times, reverse=descending)
        assert len(set(times)) > 3
    view.locator("input[type=search]").fill("zigzag star")
    wanted = [e for e in records if e.label == "zigzag" and e.config.pattern == "star"]
    assert table.locator("tbody tr:visible").count() == len(wanted)
    assert view.locator("#shown").inner_text() == f"{len(wanted)} of {len(records)} cells"

"""The documents: every page is in the site, links lead somewhere, commands can be typed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli import parser

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
PROGRAM = [".venv/bin/python", "-m", "harness"]


def commands() -> list[str]:
    """Lines of shell in the documents."""
    fenced = (re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL) for page in PAGES)
    lines = (block.replace("\\\n", " ").splitlines() for found in fenced for block in found)
    return sorted({line for block in lines for line in block if line.strip()})


def test_the_site_is_built(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    built = {page.relative_to(tmp_path / "site") for page in (tmp_path / "site").rglob("*.html")}
    for page in PAGES:
        assert page.relative_to(ROOT / "docs").with_suffix(".html") in built


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_link_leads_to_a_file(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_page_is_named_in_the_navigation() -> None:
    named = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert named == {str(page.relative_to(ROOT / "docs")) for page in PAGES}


@pytest.mark.parametrize("line", commands())
def test_a_command_of_a_document_can_be_typed(line: str) -> None:
    words = shlex.split(line, comments=True)
    if words[:1] == [".venv/bin/torchrun"]:
        words = PROGRAM + words[words.index("harness") + 1 :]
    if words[:3] == PROGRAM:
        assert parser(words[3]).parse_args(words[3:]).verb == words[3]
    for word in words:
        if word.startswith("scripts/"):
            assert (ROOT / word).exists()

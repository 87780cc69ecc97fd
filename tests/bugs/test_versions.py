"""Other packages: found by what they offer, never by a version compared as text, never changed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [
    path for name in ("patterns", "strategies", "harness") for path in (ROOT / name).rglob("*.py")
]
COMPARED = re.compile(r"version\w*(\(.*?\))?\s*[<>]|[<>]=?\s*[\w.]*version")
PATCHED = re.compile(r"^\s*(torch|transformers|flash_attn)(\.\w+)+ = ", re.MULTILINE)


@pytest.mark.parametrize(
    "line", ['if flash_attn.__version__ <= "2.6.3":', 'if version("torch") >= "2.6":']
)
def test_b062_s03_a_comparison_would_be_found(line: str) -> None:
    assert COMPARED.search(line)


def test_b062_s03_no_version_is_compared() -> None:
    assert [path.name for path in SOURCES if COMPARED.search(path.read_text())] == []


def test_b064_nothing_of_another_package_is_replaced() -> None:
    assert PATCHED.search("transformers.models.llama.attend = ours")
    assert [path.name for path in SOURCES if PATCHED.search(path.read_text())] == []

"""JSON: one writer, which knows no NaN, and a reader that takes none."""

import math
import re
from pathlib import Path

import pytest

from harness.base.json_fields import json_text, parsed

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_of_json_is_never_written(value: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text({"rows": [1.0, value]})


@pytest.mark.parametrize("text", ["[NaN]", '{"a": -Infinity}', "Infinity"])
def test_what_is_no_number_of_json_is_not_read(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number in JSON"):
        parsed(text)


def test_what_is_written_is_read_the_same() -> None:
    value = {"b": [1, 0.1, None, True, "é\x1b\ud800"], "a": {"c": -1e300}}
    for text in (json_text(value), json_text(value, indent=2), json_text(value, compact=True)):
        assert text.isascii()
        assert parsed(text) == value
    assert json_text(value, compact=True, sort_keys=True).startswith('{"a":{"c":-1e+300},"b":[1,')


def test_nothing_else_writes_json() -> None:
    """Another writer would let a NaN through, which other tools refuse."""
    own = {"harness/base/json_fields.py", "harness/cluster/calibration.py"}  # the second: TOML
    found = {
        str(path.relative_to(ROOT))
        for folder in ("harness", "strategies", "scripts")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"\bjson\.dumps?\(", path.read_text(encoding="utf-8"))
    }
    assert found == own

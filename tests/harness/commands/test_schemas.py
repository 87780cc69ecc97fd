"""What verbs print as JSON is what its schema says, and no other field gets in unseen."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from harness import cli
from harness.base.json_fields import json_text
from tests.harness.page.test_build import some


def schema(room: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((files(room) / f"{name}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main(list(words)) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_list_is_as_its_schema_says(capsys: pytest.CaptureFixture[str]) -> None:
    body, rule = printed(capsys, "list", "--json"), schema("harness.terminal", "list")
    jsonschema.validate(body, rule)
    for room in body.values():
        room[0]["new"] = 1
        with pytest.raises(jsonschema.ValidationError, match="new"):
            jsonschema.validate(body, rule)
        del room[0]["new"]


def test_report_is_as_its_schema_says(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = [json_text(entry.as_json(), compact=True) for entry in some()]
    (tmp_path / "records.jsonl").write_text("\n".join(lines) + "\n")
    page = tmp_path / "page.html"
    body = printed(capsys, "report", str(tmp_path), "-o", str(page), "--no-timeline", "--json")
    jsonschema.validate(body, schema("harness.page", "report"))
    assert body["files"] == {"page": str(page)}
    assert body["records"] == len(lines)
    assert {row["strategy"] for row in body["answers"]} == {"zigzag"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "records.jsonl"]

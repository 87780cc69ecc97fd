"""What people name as a file is read only if it is one, and no larger than any can be."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.base.files import read_text
from harness.base.json_fields import parsed
from harness.base.toml_text import from_toml
from harness.cluster.calibration import load
from harness.commands.plan import _load
from harness.sweep.suite import _text
from patterns.files import MOST_FILE_BYTES, read_regular
from patterns.tables import read_table

DEEP = "[" * 100_000 + "]" * 100_000


def made(folder: Path, kind: str, suffix: str) -> Path:
    path = folder / f"{kind}{suffix}"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(MOST_FILE_BYTES + 1)
    return path


WORDS = {
    "pipe": "it is no regular file",
    "device": "it is no regular file",
    "folder": "Is a directory",
    "large": "it is larger than 256 MiB",
}
READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "plan": (".json", _load),
    "cluster": (".toml", load),
    "suite": (".toml", lambda path: _text(str(path))),
    "table": (".txt", read_table),
    "table-json": (".json", read_table),
    "table-npy": (".npy", read_table),
}


@pytest.mark.parametrize("kind", WORDS)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, kind: str, reader: str) -> None:
    suffix, read = READERS[reader]
    with pytest.raises(ValueError, match=WORDS[kind]):
        read(made(tmp_path, kind, suffix))


def test_a_file_is_read_through_links(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("ø")
    (tmp_path / "link").symlink_to("file")
    assert read_text(tmp_path / "link") == "ø"
    assert read_regular(tmp_path / "link") == "ø".encode()
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "none")


def test_what_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    for parse, text in ((parsed, DEEP), (from_toml, f"a = {DEEP}")):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse(text)
    for reader, (suffix, read) in READERS.items():
        path = tmp_path / f"{reader}{suffix}"
        path.write_text(f"a = {DEEP}" if suffix == ".toml" else DEEP)
        if suffix in (".toml", ".json") and reader != "suite":  # a suite's text is parsed later
            with pytest.raises(ValueError, match="nested too deeply"):
                read(path)

"""Files that are written whole: links stay links, and what is no file is written to as it is."""

import os
import stat
import threading
from pathlib import Path

import pytest

from harness.base.files import write_whole
from tests.harness.records.test_store import file_size_limit


def test_the_file_behind_a_link_is_written_and_the_link_stays(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    file, link = tmp_path / "far" / "plan.json", tmp_path / "link.json"
    file.write_text("old")
    link.symlink_to(file)
    write_whole(link, "new")
    assert link.is_symlink()
    assert file.read_text() == "new"
    assert [path.name for path in (tmp_path / "far").iterdir()] == ["plan.json"]


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    """As would /dev/null and /dev/stdout, in whose place a superuser's file was put once."""
    pipe, found = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_whole(pipe, "text")
    reader.join(10)
    assert found == [b"text"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_full_disk_is_told_with_the_file_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "summary.csv"
    path.write_text("old")
    with file_size_limit(100), pytest.raises(OSError, match=r"summary\.csv'$"):
        write_whole(path, "x" * 1000)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]

"""Files that are written whole: links stay links, and what is no file is written to as it is."""

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from harness.base.files import write_whole
from tests.harness.ranks.test_team import ROOT
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


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_a_file_keeps_its_mode_and_a_new_one_heeds_the_umask(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "plan.json"
    before = os.umask(0o027)
    try:
        write_whole(path, "new")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(mode)
        write_whole(path, "newer")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert path.read_text() == "newer"


def test_what_a_killed_writer_left_is_gone_after_the_next(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from harness.base.files import write_whole\n"
        "Path.replace = lambda *_: os.kill(os.getpid(), 9)\n"
        "write_whole(Path(sys.argv[1]), 'half')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [left.name for left in tmp_path.iterdir()] == [".plan.json.part"]
    write_whole(path, "whole")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "whole"


def test_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    texts = [sign * 200_000 for sign in "abcd"]
    threads = [threading.Thread(target=write_whole, args=(path, text)) for text in texts * 5]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]

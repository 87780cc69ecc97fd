"""Records on disk: whole or not at all, one writer, and a clear word about everything else."""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.errors import MeasurementError
from harness.records.store import FILE, ResultFile, read_records
from tests.harness.ranks.test_team import ROOT

ONE, TWO = {"config_hash": "a", "n": 1}, {"config_hash": "b", "n": 2}


def written(folder: Path, *records: dict[str, object]) -> Path:
    with ResultFile(folder / FILE) as results:
        for record in records:
            results.append(record)
    return folder / FILE


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let no file grow beyond a size, as a full disk would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    written(tmp_path / "new" / "folder", ONE, TWO)
    assert read_records(tmp_path / "new" / "folder") == [ONE, TWO]


@pytest.mark.parametrize("kept", range(1, 26))
def test_a_torn_last_line_is_cut_off_wherever_it_is_torn(tmp_path: Path, kept: int) -> None:
    path = written(tmp_path, ONE, TWO)
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    assert len(whole) - first > kept
    path.write_bytes(whole[: first + kept])
    assert read_records(tmp_path) == [ONE]
    with ResultFile(tmp_path / FILE) as results:
        assert list(results.scan()) == [ONE]
        results.append(TWO)
    assert path.read_bytes() == whole


def test_a_whole_last_line_without_its_end_gets_one(tmp_path: Path) -> None:
    path = written(tmp_path, ONE, TWO)
    path.write_bytes(path.read_bytes()[:-1])
    with ResultFile(tmp_path / FILE) as results:
        assert list(results.scan()) == [ONE, TWO]
        results.append(ONE)
    assert read_records(tmp_path) == [ONE, TWO, ONE]


FOREIGN = (
    b"a shopping list",
    b"milk\n",
    b"7",
    b"7\n",
    b'{"config_hash": "a", "n": 1}\nmilk\n',
    b'{"config_hash": "a", "n": 1}\n{"n": \n',
    b'{"config_hash": "a", "n": 1}\nmilk',
    b'{"name": "mine",\n "values": []}\n',
    b"\0" * 20,
)
"""No line of ours, torn or not."""


@pytest.mark.parametrize("content", FOREIGN)
def test_a_foreign_last_line_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    """It was once taken for a torn record, and deleted."""
    path = tmp_path / FILE
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a JSON record; remove that line"):
        ResultFile(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [b'{"name": "mine"}', b'{"name": "mi'])
def test_a_file_is_changed_only_when_a_record_is_written(tmp_path: Path, content: bytes) -> None:
    """Whether the records are ours is judged after the file was opened."""
    path = tmp_path / FILE
    path.write_bytes(content)
    with ResultFile(path) as results:
        list(results.scan())
    assert path.read_bytes() == content


@pytest.mark.parametrize("other", [None, b"", b'{"config_hash": "a", "n": 1}\n'])
def test_records_that_are_removed_or_replaced_in_mid_run_are_missed(
    tmp_path: Path, other: bytes | None
) -> None:
    path = tmp_path / FILE
    with ResultFile(path) as results:
        results.append(ONE)
        path.unlink()
        if other is not None:
            path.write_bytes(other)
        for call in (results.confirm, lambda: results.append(TWO)):
            with pytest.raises(MeasurementError, match=r"was removed or replaced .* 1 records are"):
                call()
    assert (path.read_bytes() if path.exists() else None) == other


@pytest.mark.parametrize("damage", [b"{\n", b"7\n", b"\xff\xfe\n", b"\n"])
def test_damage_in_the_middle_is_refused_with_its_line(tmp_path: Path, damage: bytes) -> None:
    path = written(tmp_path, ONE, TWO)
    lines = path.read_bytes().splitlines(keepends=True)
    broken = lines[0] + damage + lines[1]
    path.write_bytes(broken)
    with pytest.raises(ValueError, match="line 2 is not a JSON record; remove that line"):
        ResultFile(tmp_path / FILE)
    assert path.read_bytes() == broken
    path.unlink()
    written(tmp_path, ONE)  # the refusal did not keep the folder locked


def test_a_second_writer_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    with ResultFile(tmp_path / FILE), pytest.raises(MeasurementError, match="another run; wait"):
        ResultFile(tmp_path / FILE)
    written(tmp_path, ONE)


def test_a_writer_that_was_killed_locks_nobody_out(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from harness.records.store import ResultFile\n"
        "ResultFile(Path(sys.argv[1]) / 'records.jsonl').append({'config_hash': 'a', 'n': 1})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    written(tmp_path, TWO)
    assert read_records(tmp_path) == [ONE, TWO]


def test_a_full_disk_is_named_and_leaves_a_valid_file(tmp_path: Path) -> None:
    with ResultFile(tmp_path / FILE) as results:
        results.append(ONE)
        size = (tmp_path / FILE).stat().st_size
        with (
            file_size_limit(size + 10),
            pytest.raises(MeasurementError, match=r"not written.*1 records are safe"),
        ):
            results.append(TWO)
        assert (tmp_path / FILE).stat().st_size == size
        assert list(results.scan()) == [ONE]
        results.append(TWO)
    assert read_records(tmp_path) == [ONE, TWO]


def test_several_records_are_written_together_or_not_at_all(tmp_path: Path) -> None:
    with ResultFile(tmp_path / "cells.jsonl") as results:
        room = len(json.dumps(ONE)) + 5
        with file_size_limit(room), pytest.raises(MeasurementError):
            results.append(ONE, TWO)
        assert list(results.scan()) == []
        results.append(ONE, TWO)
        assert list(results.scan()) == [ONE, TWO]


def test_a_number_that_is_none_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with ResultFile(tmp_path / FILE) as results:
        with pytest.raises(ValueError, match="not JSON compliant"):
            results.append({"time_s": float("nan")})
        assert (tmp_path / FILE).stat().st_size == 0


@pytest.mark.parametrize("place", ["/proc/x", "/dev/null/x"])
def test_a_place_that_cannot_be_written_is_named(place: str) -> None:
    with pytest.raises(ValueError, match=f"results .{place}.*cannot be written"):
        ResultFile(Path(place))


@pytest.mark.parametrize("opened", [ResultFile, read_records])
def test_a_device_is_refused_before_it_is_read_without_end(
    opened: Callable[[Path], object],
) -> None:
    with pytest.raises(ValueError, match=r"results ./dev/null. must be in a regular file"):
        opened(Path("/dev/null"))


def test_results_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no records\.jsonl"):
        read_records(tmp_path)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    written(tmp_path, ONE)
    with ResultFile(tmp_path / FILE), pytest.raises(MeasurementError):
        ResultFile(tmp_path / FILE)
    assert len(list(Path("/proc/self/fd").iterdir())) == before

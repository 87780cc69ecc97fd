"""The verb `sweep`: records, JSON, folders, and every wrong flag."""

import csv
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from harness import cli
from harness.commands import sweep
from harness.errors import MeasurementError
from harness.records.config import Config
from harness.records.store import FILE, read_records
from tests.harness import sweeps
from tests.harness.ranks.test_team import ROOT

SMALL = (
    *("sweep", "--mode", "simulate", "--strategies", "ring,ulysses", "--patterns", "causal"),
    *("--cp", "3", "--seqlen", "96", "--heads", "6/2", "--head-dim", "16", "--jobs", "1"),
)
DOCUMENTED = {
    *("strategy", "pattern", "cp", "seqlen_q", "seqlen_kv", "heads_q", "heads_kv", "head_dim"),
    *("batch", "dtype", "direction", "transport", "scope", "source", "status", "reason"),
    *("time_s", "samples_s", "tflops_per_gpu", "bytes_sent_per_rank", "exposed_comm_s"),
    *("imbalance", "peak_bytes", "max_rel_error", "config_hash", "plan_hash", "environment"),
    *("bound_s", "calibration", "expected_error"),
}
FURTHER = {
    *("schema_version", "cluster", "hidden", "rotary", "traceback", "p20_s", "p80_s"),
    *("resolved", "work_hash", "peak_bytes_algorithm"),
    *(
        "recorded_at",
        "plan_bound_s",
        "any_plan_bound_s",
        "planned_tokens",
        "runtime",
        "imbalance_lockstep",
        "link_bytes",
        "calibration_id",
        "inside_range",
        "expected_error_p90",
    ),
}


def call(folder: Path, *words: str) -> int:
    return cli.main([*SMALL, "-o", str(folder), *words])


def test_json_goes_to_stdout_alone_and_has_the_documented_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tmp_path, "--json") == 0
    records = json.loads(capsys.readouterr().out)
    assert len(records) == 4
    for record in records:
        assert DOCUMENTED - set(record) == set()
        assert set(record) - DOCUMENTED - FURTHER == set()
        assert (record["status"], record["source"]) == ("ok", "simulated")
        assert 0 < record["bound_s"] <= record["any_plan_bound_s"] <= record["time_s"]
        assert record["calibration"]
    assert read_records(tmp_path) == records


def test_progress_goes_to_stderr_and_stdout_is_pure_json(tmp_path: Path) -> None:
    done = sweeps.run(*SMALL, "-o", str(tmp_path / "out"), "--json", "--jobs", "2")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 4


def test_tables_and_summaries_are_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(tmp_path) == 0
    out = capsys.readouterr()
    assert "h100-hamming: cp=3 S=96 heads=6/2" in out.out
    assert str(tmp_path) in out.err
    with (tmp_path / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["strategy"] for row in rows] == ["ring", "ulysses"] * 2
    assert all(float(row["time_s"]) > 0 for row in rows)
    text = (tmp_path / "summary.md").read_text()
    cells = [line for line in text.splitlines() if line.startswith("|")]
    assert len(cells) == 2 + 4
    assert len({line.count("|") for line in cells}) == 1
    for shown in ("expected_error", "max_rel_error", "best, h100-hamming", "cp=3 S=96 heads=6/2"):
        assert shown in text
    assert "best, h100-hamming" in out.out
    assert "summary.md" in out.err


@pytest.mark.parametrize(
    ("strategies", "status"), [("usp:5x2", 1), ("usp:5x2,ring", 0), ("upipe", 1)]
)
def test_a_sweep_in_which_nothing_ran_exits_with_1(
    strategies: str, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tmp_path, "--strategies", strategies) == status
    captured = capsys.readouterr()
    assert ("none of the 2 cells ran" in captured.err) is (status == 1)
    said = " ".join(captured.out.split())
    assert "try --scope layer" in said if strategies == "upipe" else "usp:1x3" in said


def test_a_folder_with_records_is_only_written_to_when_resuming(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tmp_path) == 0
    before = (tmp_path / FILE).read_bytes()
    assert call(tmp_path) == 2
    assert "4 records; give --resume" in " ".join(capsys.readouterr().err.split())
    assert call(tmp_path, "--resume") == 0
    assert (tmp_path / FILE).read_bytes() == before
    assert call(tmp_path, "--resume", "--seqlen", "96,128") == 0
    assert len(read_records(tmp_path)) == 8
    capsys.readouterr()
    assert call(tmp_path, "--resume", "--seqlen", "96") == 0
    assert "repeat the flags" not in capsys.readouterr().err
    # Summaries are of all that the folder holds, also of what was not asked for this time.
    assert len((tmp_path / "summary.csv").read_text().splitlines()) == 1 + 8
    assert call(tmp_path, "--resume", "--seqlen", "160") == 0
    assert "none of the 8 records" in " ".join(capsys.readouterr().err.split())


def test_resuming_tries_again_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.sweep import simulate_cells

    def fail(*_: object) -> NoReturn:
        raise RuntimeError("broken")

    # where nothing is known of the cells
    monkeypatch.setenv("CPBENCH_CACHE", str(tmp_path.with_name(f"{tmp_path.name}-cache")))
    with monkeypatch.context() as patch:
        patch.setattr(simulate_cells, "predicted", fail)
        assert call(tmp_path) == 1
    assert {record["status"] for record in read_records(tmp_path)} == {"error"}
    assert call(tmp_path, "--resume", "--json") == 0
    assert [record["status"] for record in read_records(tmp_path)] == ["error"] * 4 + ["ok"] * 4


def test_packs_are_drawn_with_several_seeds_unless_one_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = "documents:preset=pile,documents:preset=megatron,seed=9"
    words = [*SMALL, "--patterns", asked, "--seeds", "3", "--direction", "forward", "--dry-run"]
    assert cli.main(words) == 0
    ring = [line.split()[3] for line in capsys.readouterr().out.splitlines() if " ring " in line]

    drawn = [f"documents:preset=pile,seed={seed}" for seed in range(3)]
    assert ring == [*drawn, "documents:preset=megatron,seed=9"]


def test_a_dry_run_lists_the_cells_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tmp_path / "out", "--dry-run") == 0
    out = capsys.readouterr()
    assert len(out.out.splitlines()) == 4
    assert "4 cells" in out.err
    assert not (tmp_path / "out").exists()
    assert call(tmp_path / "out", "--dry-run", "--json") == 0
    cells = json.loads(capsys.readouterr().out)
    assert [cell["strategy"] for cell in cells] == ["ring", "ulysses"] * 2


def test_a_full_disk_stops_with_a_message_and_a_valid_file(tmp_path: Path) -> None:
    script = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
        "from harness.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *SMALL, "-o", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "No space left" in done.stderr
    assert "records are safe" in done.stderr
    assert "Traceback" not in done.stderr
    assert 0 < len(read_records(tmp_path)) < 4
    assert call(tmp_path, "--resume") == 0
    assert len(read_records(tmp_path)) == 4


def test_a_full_disk_says_first_that_records_are_safe_also_where_no_table_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_room(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "summary.csv")

    def stopped(*_: object, **__: object) -> None:
        raise MeasurementError("3 records are safe; give --resume")

    monkeypatch.setattr(sweep, "write_summaries", no_room)
    assert call(tmp_path / "whole") == 1
    assert capsys.readouterr().err.endswith("sweep: No space left on device: summary.csv\n")
    monkeypatch.setattr(sweep, "_run", stopped)
    assert call(tmp_path / "stopped") == 1
    assert capsys.readouterr().err == "sweep: 3 records are safe; give --resume\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cp", "0"], r"--cp: (0) must be a whole number"),
        (["--cp", "-2"], "--cp"),
        (["--cp", "2,,4"], "empty entry"),
        (["--seqlen", "x"], "length (x) must be like 1000, 64k or 1m"),
        (["--seqlen", "0"], "length (0)"),
        (["--heads", "5/3"], "query heads must be a multiple of KV heads"),
        (["--heads", "8/"], "() must be a whole number"),
        (["--head-dim", "1.5"], "(1.5) must be a whole number"),
        (["--dtype", "int8"], "choose float64, float32, bfloat16, float16"),
        (["--direction", "up"], "choose forward, backward"),
        (["--mode", "guess"], "choose simulate, measure, both"),
        (["--memory", "-1"], "(-1) must be a positive number"),
        (["--timeout", "0"], "(0) must be a positive number"),
        (["--timeout", "nan"], "(nan) must be a positive number"),
        (["--iterations", "0"], "--iterations"),
        (["--strategies", "rign"], "strategy (rign) is unknown (did you mean ring?); choose from"),
        (["--strategies", "ring:x=1"], "option (x) is unknown"),
        (["--patterns", "spiral"], "spiral"),
        (
            ["--cluster", "h200-9x9"],
            "cluster (h200-9x9) is unknown (did you mean h200?); choose from",
        ),
        (["--suite", "fast"], "suite (fast) is unknown; choose from"),
        (["-o", "/proc/x"], "/proc/x"),
        (["--unknown"], "--unknown"),
    ],
)
def test_a_wrong_flag_is_named_and_nothing_runs(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: int | str | None = call(tmp_path / "out", *words)
    except SystemExit as left:
        status = left.code
    error = capsys.readouterr().err
    assert status == 2, error
    assert message in " ".join(error.split())
    assert not (tmp_path / "out").exists()


def test_a_reader_that_leaves_early_is_no_failure(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", *SMALL, "--dry-run", "-o", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, error = process.communicate()
    assert (process.returncode, error) == (0, "")


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_tables_for_a_reader_that_leaves_early_are_no_failure(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "harness", *SMALL, *words, "-o", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    _, error = process.communicate()
    assert process.returncode == 0, error
    assert "Error" not in error
    assert len(read_records(tmp_path)) == 4


def test_a_terminal_without_the_signs_shows_others(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness", *SMALL, "-o", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"ulysses" in done.stdout


def test_a_table_or_a_cluster_that_was_edited_makes_another_cell(tmp_path: Path) -> None:
    """Once the old time was given for it: by --resume, and by what is kept between runs."""
    table, machine, folder = tmp_path / "t.txt", tmp_path / "mine.toml", tmp_path / "out"
    shipped = (Path(cli.__file__).parent / "cluster" / "calibrations" / "h800.toml").read_text()
    words = (
        *("sweep", "--mode", "simulate", "--strategies", "ring", "--direction", "forward"),
        *("--patterns", f"table:file={table}", "--cluster", str(machine), "--jobs", "1"),
        *("--cp", "3", "--seqlen", "3000", "--heads", "6/2", "-o", str(folder), "--resume"),
    )
    for cells, start in (("10\n01\n", "1e-5"), ("11\n11\n", "1e-5"), ("11\n11\n", "3e-5")):
        table.write_text(cells)
        machine.write_text(re.sub(r"(?m)^launch_s = \S+", f"launch_s = {start}", shipped))
        assert cli.main(words) == 0
    records = read_records(folder)
    assert len({record["config_hash"] for record in records}) == 3
    assert len({record["time_s"] for record in records}) == 3
    assert cli.main(words) == 0
    assert read_records(folder) == records


def of_pattern(text: str) -> Config:
    sizes = {"seqlen_q": 64, "seqlen_kv": 64, "heads_q": 6, "heads_kv": 2, "head_dim": 16}
    return Config(strategy="ring", pattern=text, cp=2, **sizes)


@pytest.mark.parametrize("spelling", ["table:file={}", " table : file = {} "])
def test_a_table_that_was_edited_is_another_cell_however_it_is_spelled(
    spelling: str, tmp_path: Path
) -> None:
    table = tmp_path / "mine.txt"
    hashes = set()
    for cells in ("10\n01\n", "11\n11\n"):
        table.write_text(cells, encoding="utf-8")
        hashes.add(of_pattern(spelling.format(table)).hash)
    assert len(hashes) == 2
    assert of_pattern("tabel:file=none").hash  # a wrong name is refused where it is read

"""The example package: its strategy and its pattern work in every verb and every process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from harness.attention.parallel import context_parallel
from harness.cli import main
from harness.explain.volumes import received_bytes
from harness.plan.problem import Direction, Dtype, Problem
from harness.records import config as config_module
from harness.records.config import Config
from harness.verify.pair import check_pair
from harness.verify.proof import verify
from patterns import make_pattern, outside
from strategies import strategy

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "outside"
STRATEGY = "bothways.ring:STRATEGY"
PATTERN = "bothways.prefix:PATTERN"


@pytest.fixture(autouse=True)
def example_on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield
    outside.registered.cache_clear()


def called(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        status = main(list(words))
    except SystemExit as stop:
        status = int(stop.code or 0)
    said = capsys.readouterr()
    return status, said.out, " ".join(said.err.split())


def problem(cp: int, seqlen: int, pattern: str = "full") -> Problem:
    return Problem(
        pattern=make_pattern(pattern, seqlen),
        heads_q=6,
        heads_kv=2,
        head_dim=5,
        head_dim_v=3,
        batch=2,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )


# Every verb ---------------------------------------------------------------------------------


def test_real_processes_check_it_against_the_oracle() -> None:
    """In workers that are started anew, which find the package by its name."""
    text = f"{STRATEGY}:ways=2"
    words = f"check --strategies {text} --patterns {PATTERN} --cp 2 --seqlen 29 --heads 6/2"
    words += " --dtype float64 --batch 2 --head-dim 5 --transport gloo --json"
    path = os.pathsep.join((str(ROOT), str(EXAMPLE)))
    done = subprocess.run(
        [sys.executable, "-m", "harness", *words.split()],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        check=True,
        text=True,
        timeout=120,
    )
    body = json.loads(done.stdout)
    assert (body["passed"], body["failed"], body["refused"]) == (2, 0, 0)
    assert {(cell["strategy"], cell["pattern"]) for cell in body["cells"]} == {
        (text, f"{PATTERN}:length=10")
    }


def test_it_is_listed_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = called(capsys, "list", "strategies", STRATEGY, "--json")
    assert status == 0
    (entry,) = json.loads(out)["strategies"]
    assert entry["name"] == STRATEGY
    assert [option["name"] for option in entry["options"]] == ["prune", "ways"]
    status, out, _ = called(capsys, "list", "patterns", PATTERN)
    assert status == 0
    assert "length (must be given)" in out


def test_explain_has_its_closed_form_and_what_it_chose(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--pattern", "full", "--cp", "4", "--seqlen", "1k", "--json")
    status, out, _ = called(capsys, "explain", "--strategy", STRATEGY, *words)
    body = json.loads(out)
    assert status == 0
    assert body["resolved"] == f"{STRATEGY}:ways=2"
    assert body["closed_form_bytes"] == body["volume_bytes"] > 0
    assert body["closed_form_bytes_backward"] == body["volume_bytes_backward"] > 0


def test_explain_names_its_alternatives(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--pattern", PATTERN + ":length=9", "--cp", "4", "--seqlen", "61", "--json")
    status, out, _ = called(capsys, "explain", "--strategy", f"{STRATEGY}:ways=3", *words)
    body = json.loads(out)
    assert status == 1
    assert "ways (3) must be 1 or 2" in body["reason"]
    near = [flags for flags in body["nearest"] if "--cp 4" in flags]
    assert near == [f"--strategy {STRATEGY}:ways={ways} --cp 4" for ways in (2, 1)]


def test_plan_simulate_and_trace_take_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    problem_words = ("--pattern", f"{PATTERN}:length=77", "--cp", "4", "--seqlen", "1k")
    for verb, *more in (("plan",), ("simulate",), ("trace", "-o", str(tmp_path / "trace.json"))):
        words = (verb, "--strategy", f"{STRATEGY}:prune=false", *problem_words, *more)
        status, out, err = called(capsys, *words)
        assert (status, err.partition(": written")[0]) == (0, more[-1] if more else ""), verb
        assert f"{STRATEGY}:prune=false" in out, verb
    assert (tmp_path / "trace.json").stat().st_size > 0


def test_a_sweep_has_it_beside_others(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    texts = ("ring", STRATEGY, f"{STRATEGY}:ways=1,prune=false")
    words = ("--cp", "4", "--seqlen", "64k", "-o", str(tmp_path / "out"), "--json")
    given = ("--strategies", ",".join(texts), "--patterns", f"causal,{PATTERN}:length=99")
    status, _, _ = called(capsys, "sweep", "--mode", "simulate", *given, *words)
    lines = (tmp_path / "out" / "records.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    spelled = (*texts[:2], f"{STRATEGY}:prune=false,ways=1")
    assert status == 0
    assert {(r["strategy"], r["pattern"], r["status"]) for r in records} == set(
        product(spelled, ("causal", f"{PATTERN}:length=99"), ("ok",))
    )


def test_a_model_takes_it() -> None:
    cp = context_parallel(
        strategy=STRATEGY, pattern=f"{PATTERN}:length=4", seqlen=13, heads_q=6, heads_kv=2
    )
    q, k, v = (torch.randn(1, heads, 13, 5, dtype=torch.float64) for heads in (6, 2, 2))
    allowed = torch.from_numpy(cp.pattern.allowed(np.arange(13), np.arange(13)))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=allowed, enable_gqa=True
    )
    assert torch.allclose(cp.attend(q, k, v), expected, rtol=0, atol=1e-12)


# Right --------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("text", [STRATEGY, f"{STRATEGY}:prune=false", f"{STRATEGY}:ways=1"])
def test_each_rank_receives_what_the_closed_form_says(text: str, direction: Direction) -> None:
    for cp in (1, 2, 3, 5):
        asked = problem(cp, 2 * cp * 7)
        form = strategy(text).volume(asked, direction)
        assert form is not None
        plan = strategy(text).plan(asked, direction)
        assert form.received_bytes == received_bytes(plan), cp


def test_no_closed_form_is_claimed_outside_its_range() -> None:
    for asked in (problem(3, 43), problem(3, 42, "causal")):
        assert strategy(STRATEGY).volume(asked, Direction.FORWARD) is None


def test_half_of_the_keys_travel_either_way() -> None:
    plan = strategy(STRATEGY).plan(problem(5, 50), Direction.FORWARD)
    moves = [task.leg for task in plan.tasks if hasattr(task, "leg")]
    turns = {(leg.dst.rank - leg.src.rank) % 5 for leg in moves}
    assert turns == {1, 4}
    for leg in moves:
        half = 0 if (leg.dst.rank - leg.src.rank) % 5 == 1 else 1
        assert {chunk % 2 for piece in leg.pieces for chunk in piece.chunks} == {half}


@pytest.mark.parametrize("text", [STRATEGY, f"{STRATEGY}:prune=false"])
@pytest.mark.parametrize("pattern", ["causal", f"{PATTERN}:length=3", "window:left=2"])
def test_its_plans_are_proved(text: str, pattern: str) -> None:
    for cp, seqlen in ((1, 5), (2, 3), (3, 29), (7, 5)):
        both = [strategy(text).plan(problem(cp, seqlen, pattern), d) for d in Direction]
        for plan in both:
            verify(plan)
        check_pair(*both)


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(1, 1), (9, 9), (5, 13), (13, 5)])
@pytest.mark.parametrize("length", [1, 4, 40])
def test_the_bands_of_the_pattern_are_its_definition(
    length: int, seqlen_q: int, seqlen_kv: int
) -> None:
    pattern = make_pattern(f"{PATTERN}:length={length}", seqlen_q, seqlen_kv, cross=True)
    wanted = sum(k < length or k <= q for q in range(seqlen_q) for k in range(seqlen_kv))
    assert pattern.total_area == wanted
    assert wanted == int(pattern.allowed(np.arange(seqlen_q), np.arange(seqlen_kv)).sum())


# Names --------------------------------------------------------------------------------------


def test_an_installed_package_registers_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an installer leaves it: metadata beside the package, from the example's own pyproject."""
    points = (
        "[cpbench.strategies]\nbothways = bothways.ring:STRATEGY\nbroken = bothways.none:NOTHING\n"
        "[cpbench.patterns]\nprefix = bothways.prefix:PATTERN\n"
    )
    info = tmp_path / "bothways-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bothways\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    outside.registered.cache_clear()

    assert strategy("bothways:ways=1").text == "bothways:ways=1"
    assert make_pattern("prefix:length=3", 7).text == "prefix:length=3"
    status, out, _ = called(capsys, "list", "strategies", "--json")
    listed = {entry["name"]: entry for entry in json.loads(out)["strategies"]}
    assert status == 0
    assert listed["bothways"]["options"]
    assert "No module named 'bothways.none'" in listed["broken"]["summary"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--strategy", "nopkg.ring:STRATEGY"), "No module named 'nopkg'"),
        (("--strategy", "bothways.ring:NOTHING"), "has no attribute 'NOTHING'"),
        (("--strategy", PATTERN), "must be a Strategy, but is a Kind"),
        (("--strategy", f"{STRATEGY}:pace=3"), "option (pace) is unknown"),
        (("--strategy", "ringg:prune"), "choose from allgather, double_ring"),
        (("--strategy", "ring", "--pattern", "nopkg.mask:PATTERN"), "No module named 'nopkg'"),
        (("--strategy", "ring", "--pattern", STRATEGY), "must be a Kind, but is a Strategy"),
    ],
)
def test_what_cannot_be_had_is_one_clear_line(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = called(capsys, "plan", *flags, "--cp", "2", "--seqlen", "64")
    assert (status, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


def test_a_package_that_fails_when_it_is_imported_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails_at_once.py").write_text("raise RuntimeError('no\\nlicence')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"fails_at_once:S\).*RuntimeError: no licence"):
        strategy("fails_at_once:S")


def test_a_name_of_ours_goes_before_a_path() -> None:
    for text in ("ring:prune=false", "usp:2x2", "a2a", "ring"):
        assert ":STRATEGY" not in strategy(text).text


def test_another_text_of_the_package_makes_another_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nothing kept, and no record, of the old text answers for the new one."""
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "edited_often"
    package.mkdir()
    hashes = []
    for text in ("x = 1\n", "x = 1\n", "x = 2\n"):
        (package / "helper.py").write_text(text)
        config_module._digest.cache_clear()  # as in another process
        cell = Config(
            strategy="edited_often.ring:STRATEGY",
            pattern="causal",
            cp=2,
            seqlen_q=8,
            seqlen_kv=8,
            heads_q=2,
            heads_kv=1,
            head_dim=3,
        )
        hashes.append(cell.hash)
    assert hashes[0] == hashes[1] != hashes[2]

"""The timing scripts on small cells: what they print, in the form that others read."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from harness.execute.kernel_floor import kernel_calls
from harness.plan.problem import Dtype, Problem
from harness.planning.peers import PEERS
from harness.prepare.verified_plans import planned
from patterns import make_pattern
from tests.harness.ranks.test_team import ROOT


def rows(script: str, *words: str, status: int = 0) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, f"scripts/{script}", "--json", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_ours_and_a_peer_are_timed_in_pairs() -> None:
    if not PEERS["peer:ring-flash-attn/zigzag"].installed:
        pytest.skip("ring-flash-attn is not installed")
    small = ("--cp", "2", "--seqlen", "64", "--heads", "4", "--head-dim", "16", "--pairs", "3")
    found = rows("bench_peers.py", *small, "--strategies", "zigzag")
    assert [row["direction"] for row in found] == ["forward", "forward+backward"]
    for row in found:
        assert (row["ours"], row["peer"]) == ("zigzag", "peer:ring-flash-attn/zigzag")
        assert (row["cp"], row["seqlen"], row["pairs"]) == (2, 64, 3)
        assert 0 < row["p20"] <= row["ratio"] <= row["p80"]
        assert row["floor_ratio"] > 0
        assert row["cpu_ratio"] > 0


def test_the_shares_of_a_run_add_up_to_it() -> None:
    small = ("--cp", "2", "--seqlen", "96", "--heads", "4/2", "--head-dim", "16", "--runs", "3")
    found = rows("bench_executor.py", *small, "--strategies", "ring,ulysses")
    assert len(found) == 8  # strategies x directions x ranks
    for row in found:
        assert 0 < row["kernel_s"] < row["run_s"]
        assert row["python_s"] > 0
        assert row["issue_s"] > 0


def test_a_sparse_pattern_is_timed_and_predicted() -> None:
    small = ("--cp", "2", "--seqlen", "128", "--heads", "4/2", "--head-dim", "16", "--pairs", "3")
    (row,) = rows("bench_sparse.py", *small, "--patterns", "strided", "--tolerance", "1e9")
    assert row["pruned_bytes"] < row["classic_bytes"]
    assert row["predicted"] > 1
    assert 0 < row["p20"] <= row["ratio"] <= row["p80"]


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_the_floor_is_every_kernel_call_of_a_rank(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(
        pattern=make_pattern("causal", 53),
        heads_q=6,
        heads_kv=2,
        head_dim=8,
        batch=2,
        dtype=Dtype.BFLOAT16,
        cp=2,
    )
    both = planned(problem, strategy)
    seen: list[int] = []
    for name in ("attend_call", "attend_backward"):
        real = getattr(sys.modules["harness.execute.kernels"], name)

        def counted(*args: Any, real: Any = real) -> object:  # noqa: ANN401  # passes all on
            mask = args[-2]
            heads = args[0].shape[1]
            cells = sum(len(mask.k) if mask.kind == "full" else at + 1 for at in range(len(mask.q)))
            seen.append(heads * cells)
            return real(*args)

        monkeypatch.setattr(f"harness.execute.kernels.{name}", counted)
    for program in (both.forward, both.backward):
        runs = [kernel_calls(program, rank) for rank in range(2)]
        seen.clear()
        for run in runs:
            run()
        assert sum(seen) == problem.pattern.total_area * problem.heads_q


def test_what_comparing_calls_costs_is_timed_in_pairs() -> None:
    small = ("--cp", "2", "--seqlen", "96", "--heads", "4/2", "--head-dim", "16", "--pairs", "5")
    (row,) = rows("bench_agreement.py", *small)
    assert (row["cp"], row["seqlen"], row["pairs"]) == (2, 96, 5)
    assert 0 < row["p20"] <= row["ratio"] <= row["p80"]


def test_a_bound_program_costs_the_host_less_than_the_walk_of_the_plan() -> None:
    forward, backward = rows(
        "bench_program.py", "--strategies", "zigzag", "--cp", "4", "--runs", "3"
    )
    for row in (forward, backward):
        assert 0 < row["walk_ms"] < row["bound_ms"] < row["executor_ms"]
        assert 0 < row["launches"] < row["operations"]

"""Answers of the solver: proved, limited, impossible, interrupted, repeatable and silent."""

import math
import os
import subprocess
import time
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.schedule.scip import PROOF, SolverAnswer, SolverStatus, new_model, relative_gap, solve

if TYPE_CHECKING:
    from pyscipopt import Model, Variable

SIZES = [5, 8, 3, 7, 4, 9, 6]
WORTH = [4, 11, 2, 9, 5, 10, 7]


def knapsack(room: int, *, log: bool = False) -> tuple["Model", list["Variable"]]:
    from pyscipopt import quicksum

    model = new_model("knapsack", log=log)
    x = [model.addVar(vtype="B", obj=-worth) for worth in WORTH]
    model.addCons(quicksum(size * v for size, v in zip(SIZES, x, strict=True)) <= room)
    return model, x


def hard(seed: int = 3) -> "Model":
    """A market split: equations on which branch and bound does not end in minutes."""
    from pyscipopt import quicksum

    rng = np.random.default_rng(seed)
    rows, columns = 5, 40
    model = new_model("market split")
    x = [model.addVar(vtype="B") for _ in range(columns)]
    for _ in range(rows):
        weights = rng.integers(0, 100, columns).tolist()
        over, under = model.addVar(obj=1), model.addVar(obj=1)
        mine = quicksum(w * v for w, v in zip(weights, x, strict=True))
        model.addCons(mine + over - under == sum(weights) // 2)
    return model


@given(st.integers(0, sum(SIZES) + 2), st.sampled_from([None, PROOF]))
@settings(max_examples=12, deadline=None)
def test_the_optimum_is_that_of_brute_force(room: int, settings: dict[str, str] | None) -> None:
    best = max(
        sum(w for w, taken in zip(WORTH, choice, strict=True) if taken)
        for choice in product((0, 1), repeat=len(SIZES))
        if sum(s for s, taken in zip(SIZES, choice, strict=True) if taken) <= room
    )
    model, x = knapsack(room)
    answer = solve(model, time_limit_s=60, settings=settings)
    assert answer.status is SolverStatus.OPTIMAL
    assert (answer.value, answer.bound, answer.gap) == (-best, -best, 0)
    solution = model.getBestSol()
    assert solution is not None
    chosen = [solution[v] > 0.5 for v in x]
    assert sum(w for w, taken in zip(WORTH, chosen, strict=True) if taken) == best
    assert sum(s for s, taken in zip(SIZES, chosen, strict=True) if taken) <= room


def test_an_impossible_program_says_so() -> None:
    model, x = knapsack(5)
    model.addCons(x[0] + x[2] == 2)  # 8 > 5
    answer = solve(model, time_limit_s=60)
    assert answer.status is SolverStatus.INFEASIBLE
    assert answer.value is None
    assert answer.bound == answer.gap == math.inf


def test_the_limit_is_kept_and_the_answer_has_a_gap() -> None:
    start = time.process_time()
    answer = solve(hard(), time_limit_s=0.4)
    assert time.process_time() - start < 3
    assert answer.status is SolverStatus.FEASIBLE
    assert answer.value is not None
    assert answer.bound < answer.value
    assert answer.gap == relative_gap(answer.value, answer.bound) > 0


def test_without_time_there_is_no_answer() -> None:
    answer = solve(hard(), time_limit_s=-1)
    assert answer == SolverAnswer(
        status=SolverStatus.TIME_LIMIT, value=None, bound=answer.bound, seconds=answer.seconds
    )
    assert answer.gap == math.inf


def test_a_gap_that_is_allowed_ends_the_solve() -> None:
    from pyscipopt import quicksum

    def run(gap: float) -> SolverAnswer:
        rng = np.random.default_rng(5)
        model = new_model("knapsacks")
        x = [model.addVar(vtype="B", obj=-int(w)) for w in rng.integers(20, 60, 30)]
        for sizes in rng.integers(10, 50, (5, 30)).tolist():
            model.addCons(quicksum(s * v for s, v in zip(sizes, x, strict=True)) <= 300)
        return solve(model, time_limit_s=60, gap=gap)

    exact, loose = run(0.0), run(0.3)
    assert exact.status is SolverStatus.OPTIMAL
    assert loose.status is SolverStatus.FEASIBLE
    assert 0 < loose.gap <= 0.3
    assert exact.value is not None
    assert loose.value is not None
    assert loose.bound <= exact.value <= loose.value


def test_equal_seeds_give_equal_runs() -> None:
    def run(seed: int) -> tuple[float | None, int]:
        model = hard()
        answer = solve(model, time_limit_s=60, seed=seed, settings={"limits/nodes": 50})
        return answer.value, model.getNLPIterations()

    assert run(1) == run(1)
    assert len({run(seed)[1] for seed in range(3)}) > 1


@pytest.mark.parametrize("log", [False, True])
def test_the_log_is_off_unless_asked_for(log: bool, capfd: pytest.CaptureFixture[str]) -> None:
    solve(knapsack(17, log=log)[0], time_limit_s=60)
    printed = capfd.readouterr()
    assert ("SCIP Status" in printed.out) is log
    assert not printed.err


def test_a_solve_takes_one_thread() -> None:
    model = hard()
    start = time.process_time(), time.perf_counter()
    solve(model, time_limit_s=0.5)
    assert time.process_time() - start[0] <= 1.2 * (time.perf_counter() - start[1]) + 0.2
    assert model.getParam("lp/threads") == 1


def test_ctrl_c_ends_the_solve_and_is_passed_on() -> None:
    # from another process, as a terminal sends it: the solver holds Python's lock
    model = hard()
    with (
        subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -INT {os.getpid()}"]),
        pytest.raises(KeyboardInterrupt),
    ):
        solve(model, time_limit_s=30)


@pytest.mark.parametrize(
    ("value", "bound", "gap"), [(7, 7, 0), (8, 6, 0.25), (-6, -8, 0.25), (0, 0, 0), (4, 0, 1)]
)
def test_the_gap_is_relative_to_the_larger(value: float, bound: float, gap: float) -> None:
    assert relative_gap(value, bound) == gap

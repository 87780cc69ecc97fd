"""Integer programs through SCIP: one thread, a limit, a seed, and an answer that says its worth."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyscipopt import Model

Setting = bool | int | float | str

# Proves small programs fast once a start is known: no separation, no heuristics.
PROOF: Mapping[str, Setting] = {"separating": "off", "heuristics": "off"}


class SolverStatus(StrEnum):
    """How far a solve came."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"  # a solution, and no proof that none is better: gap > 0
    INFEASIBLE = "infeasible"
    TIME_LIMIT = "time_limit"  # no solution when the time was over


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverAnswer:
    """Answer of the solver.

    Attributes:
        status: How far the solve came.
        value: Objective of the best solution; None without one.
        bound: Proved bound on the objective; infinite when infeasible.
        seconds: CPU time of the solve.
    """

    status: SolverStatus
    value: float | None
    bound: float
    seconds: float

    @property
    def gap(self) -> float:
        """|value - bound| over the larger of both; 0 when proved, infinite without a solution."""
        if self.value is None:
            return math.inf
        return relative_gap(self.value, self.bound)


def relative_gap(value: float, bound: float) -> float:
    """Return |value - bound| over the larger magnitude of both; 0 when equal."""
    if value == bound:
        return 0.0
    return abs(value - bound) / max(abs(value), abs(bound))


def new_model(name: str, *, log: bool = False) -> "Model":
    """Return an empty program that minimises; SCIP's log is off unless asked for."""
    from pyscipopt import Model  # slow to import, and most plans need no solver

    model = Model(name)
    model.hideOutput(not log)
    return model


def solve(
    model: "Model",
    *,
    time_limit_s: float,
    gap: float = 0.0,
    seed: int = 0,
    settings: Mapping[str, Setting] | None = None,
) -> SolverAnswer:
    """Solve a program on one thread.

    Args:
        model: The program; its best solution can be read from it afterwards.
        time_limit_s: CPU seconds, >= 0.
        gap: Stop when the relative gap is at most this.
        seed: Shifts every random choice of the solver; equal seeds give equal runs.
        settings: SCIP parameters by name; `separating` and `heuristics` take `off`.

    Raises:
        KeyboardInterrupt: The user pressed Ctrl-C.
    """
    from pyscipopt.scip import PY_SCIP_PARAMSETTING

    model.setParam("lp/threads", 1)
    model.setParam("timing/clocktype", 1)  # CPU time: other jobs on the machine do not count
    model.setParam("limits/time", max(time_limit_s, 0.0))
    model.setParam("limits/gap", gap)
    model.setParam("randomization/randomseedshift", seed)
    setters: Mapping[str, Callable[[int], None]] = {
        "separating": model.setSeparating,
        "heuristics": model.setHeuristics,
    }
    for name, value in (settings or {}).items():
        if name in setters:
            setters[name](PY_SCIP_PARAMSETTING.OFF)
        else:
            model.setParam(name, value)
    model.optimize()
    return _answer(model)


def _answer(model: "Model") -> SolverAnswer:
    state = model.getStatus()
    seconds = model.getSolvingTime()
    if state == "userinterrupt":
        raise KeyboardInterrupt
    if state == "infeasible":
        return SolverAnswer(
            status=SolverStatus.INFEASIBLE, value=None, bound=math.inf, seconds=seconds
        )
    bound = model.getDualbound()
    if not model.getNSols():
        return SolverAnswer(
            status=SolverStatus.TIME_LIMIT, value=None, bound=bound, seconds=seconds
        )
    value = model.getObjVal()
    proved = state == "optimal" or relative_gap(value, bound) < 1e-9
    return SolverAnswer(
        status=SolverStatus.OPTIMAL if proved else SolverStatus.FEASIBLE,
        value=value,
        bound=value if proved else bound,
        seconds=seconds,
    )

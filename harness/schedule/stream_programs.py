"""Start times by integer programs, for a whole instance or for a window of an order.

cumulative   integer starts, each stream a cumulative constraint of capacity 1
big_m        the published form: a binary per pair of tasks on a stream
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from harness.schedule.list_schedules import Starts, StreamInstance
from harness.schedule.scip import Setting, SolverAnswer, new_model, solve

if TYPE_CHECKING:
    from pyscipopt import Model, Variable

_NO_CUTS: Mapping[str, Setting] = {"separating": "off"}
"""SCIP 10.0.2 writes beyond its memory where it separates cuts of some of these programs, and the
process is gone. Their linear relaxation is weak, so cuts prove nothing here."""


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """Tasks to be ordered, and what the other tasks impose on them.

    Attributes:
        instance: The tasks.
        heads: Per task, when it can start at the earliest, ticks.
        tails: Per task, what must pass after its end, ticks.
        floor: Times that pass anyway, ticks.
    """

    instance: StreamInstance
    heads: Sequence[int]
    tails: Sequence[int]
    floor: Sequence[int]


def time_window(
    instance: StreamInstance, before: Sequence[int], free: Sequence[int], after: Sequence[int]
) -> TimeWindow:
    """Cut a window out of an order: what precedes it gives heads, what follows it tails."""
    heads, ends_before = _earliest(instance, before, free)
    tails, _ = _earliest(instance.mirrored, after[::-1], free)
    place = {task: at for at, task in enumerate(free)}
    inside = StreamInstance(
        tuple(instance.durations[task] for task in free),
        tuple(instance.streams[task] for task in free),
        tuple(tuple(place[f] for f in instance.after[task] if f in place) for task in free),
        tuple(instance.moves[task] for task in free),
    )
    own_heads, own_tails = _along_edges(inside, heads), _along_edges(inside.mirrored, tails)
    return TimeWindow(inside, own_heads, own_tails, ends_before)


def _earliest(
    instance: StreamInstance, fixed: Sequence[int], free: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Starts of the free tasks after fixed ones in this order, and the ends of the fixed ones."""
    ends: dict[int, int] = {}
    busy: dict[int, int] = {}
    for task in fixed:
        earlier = [ends.get(first, 0) for first in instance.after[task]]
        earlier += [busy.get(stream, 0) for stream in instance.streams[task]]
        ends[task] = max(earlier, default=0) + instance.durations[task]
        busy.update(dict.fromkeys(instance.streams[task], ends[task]))
    heads = []
    for task in free:
        earlier = [ends.get(first, 0) for first in instance.after[task]]
        earlier += [busy.get(stream, 0) for stream in instance.streams[task]]
        heads.append(max(earlier, default=0))
    return heads, list(ends.values())


def _along_edges(inside: StreamInstance, heads: Sequence[int]) -> list[int]:
    """Carry heads along the edges of a window."""
    reached = list(heads)
    for task in inside.sorted:
        for first in inside.after[task]:
            reached[task] = max(reached[task], reached[first] + inside.durations[first])
    return reached


Builder = Callable[..., tuple[SolverAnswer, Starts | None]]
"""(window, starts, bound, time limit, seed, log) -> the answer, and starts if it has any."""


def cumulative(
    window: TimeWindow, starts: Starts, *, bound: int, time_limit_s: float, seed: int, log: bool
) -> tuple[SolverAnswer, Starts | None]:
    """Solve the start-time program, each stream a cumulative constraint of capacity 1.

    Sets: tasks v with duration d_v; streams r; edges (u, v).
    Variables: integer starts s_v in [head_v, UB - tail_v - d_v]; the end E in [bound, UB].
    Constraints: s_v >= s_u + d_u per edge; E >= s_v + d_v + tail_v; cumulative(s, d, 1) per stream.
    Objective: min E.

    Args:
        window: The tasks, with what others impose.
        starts: A schedule, to start from.
        bound: No schedule ends before.
        time_limit_s: CPU seconds.
        seed: Of the solver.
        log: Let the solver print.
    """
    model = new_model("streams", log=log)
    instance = window.instance
    most = _length(window, starts)
    least = min(max([bound, *window.floor]), most)
    end = model.addVar("end", vtype="I", lb=least, ub=most)
    begin = _start_variables(model, window, most)
    for task, variable in enumerate(begin):
        after = instance.durations[task] + window.tails[task]
        model.addCons(end >= variable + after, f"end_{task}")
        for first in instance.after[task]:
            model.addCons(
                variable >= begin[first] + instance.durations[first], f"edge_{first}_{task}"
            )
    for stream, tasks in instance.on_stream.items():
        if len(tasks) > 1:
            model.addConsCumulative(
                [begin[task] for task in tasks],
                [instance.durations[task] for task in tasks],
                [1] * len(tasks),
                1,
                name=f"stream_{stream}",
            )
    model.setObjective(end, "minimize")
    values = [(end, most), *zip(begin, starts, strict=True)]
    return _solved(model, begin, values, time_limit_s, seed, _NO_CUTS)


def big_m(
    window: TimeWindow, starts: Starts, *, bound: int, time_limit_s: float, seed: int, log: bool
) -> tuple[SolverAnswer, Starts | None]:
    """Solve the published form: a binary per pair of tasks on a stream decides who goes first.

    Variables: s_v >= 0; y_uv in {0, 1} per pair on a stream; E.
    Constraints: s_u + d_u <= s_v + M (1 - y_uv); s_v + d_v <= s_u + M y_uv; s_v >= s_u + d_u per
    edge; E >= s_v + d_v. M is the sum of all durations.
    Objective: min E.

    Source: UltraAttn (SC'25), equations 3 to 6.
    """
    del bound
    model = new_model("streams_big_m", log=log)
    instance = window.instance
    total = sum(instance.durations)
    end = model.addVar("end", vtype="C", lb=0, ub=total)
    begin = [
        model.addVar(f"start_{task}", vtype="I", lb=0, ub=total)
        for task in range(len(instance.durations))
    ]
    values = [(end, _length(window, starts)), *zip(begin, starts, strict=True)]
    for task, variable in enumerate(begin):
        model.addCons(end >= variable + instance.durations[task], f"end_{task}")
        for first in instance.after[task]:
            model.addCons(
                variable >= begin[first] + instance.durations[first], f"edge_{first}_{task}"
            )
    pairs = {pair for tasks in instance.on_stream.values() for pair in combinations(tasks, 2)}
    for one, other in sorted(pairs):
        goes_first = model.addVar(f"first_{one}_{other}", vtype="B")
        values.append((goes_first, int(starts[one] < starts[other])))
        model.addCons(
            begin[one] + instance.durations[one] <= begin[other] + total * (1 - goes_first),
            f"before_{one}_{other}",
        )
        model.addCons(
            begin[other] + instance.durations[other] <= begin[one] + total * goes_first,
            f"after_{one}_{other}",
        )
    model.setObjective(end, "minimize")
    return _solved(model, begin, values, time_limit_s, seed)


def _length(window: TimeWindow, starts: Starts) -> int:
    ends = zip(starts, window.instance.durations, window.tails, strict=True)
    return max([*map(sum, ends), *window.floor], default=0)


def _start_variables(model: "Model", window: TimeWindow, most: int) -> "list[Variable]":
    return [
        model.addVar(f"start_{task}", vtype="I", lb=head, ub=most - tail - duration)
        for task, (head, duration, tail) in enumerate(
            zip(window.heads, window.instance.durations, window.tails, strict=True)
        )
    ]


def _solved(
    model: "Model",
    begin: "Sequence[Variable]",
    values: "Sequence[tuple[Variable, int]]",
    time_limit_s: float,
    seed: int,
    settings: Mapping[str, Setting] | None = None,
) -> tuple[SolverAnswer, Starts | None]:
    """Start the solver from known values; read the starts of its best solution."""
    known = model.createSol()
    for variable, value in values:
        model.setSolVal(known, variable, value)
    model.addSol(known)
    answer = solve(model, time_limit_s=time_limit_s, seed=seed, settings=settings)
    if answer.value is None:
        return answer, None
    return answer, tuple(round(model.getVal(variable)) for variable in begin)

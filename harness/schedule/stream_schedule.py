"""Start times of a plan's tasks: bound, lists, an exact program, and windows of large graphs.

Each step stops when the schedule meets the bound. Times are whole ticks, so that no tolerance of a
solver has to be repaired; durations are rounded down, so that a bound on them is one on the plan.

    bound       longest path, and each stream's best preemptive schedule
    lists       by critical path and by stronger tails, breadth first, randomised, both ways
    program     starts under SCIP's cumulative constraint, one per stream, small graphs
    windows     the same for the tasks of a window of time, all others kept in order, large graphs
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, isfinite

from harness.cluster.machine import Cluster
from harness.plan.dependencies import reordered
from harness.plan.plan import Plan
from harness.schedule.list_schedules import (
    Starts,
    StreamInstance,
    breadth_first,
    critical_path,
    forward_backward,
    longest_tail_first,
    random_lists,
)
from harness.schedule.scip import SolverStatus, relative_gap
from harness.schedule.stream_programs import Builder, TimeWindow, big_m, cumulative, time_window
from harness.simulate.timeline import TaskGraph, Timeline, graph_of, issued_ahead

FEW_TASKS = 110  # tasks; up to here the cumulative program is proved in seconds
SHORT_STREAM = 15  # tasks of a stream; likewise
_WINDOWS = (90, 150, 250)  # tasks of a window: 30 are too few to gain anything
_WINDOW_S = 2.0
_TICKS = 1_000_000  # per bound: fine enough to lose nothing, coarse enough for a solver


class Method(StrEnum):
    """How streams are ordered.

    BEST is the whole pipeline; LISTS is its part without a solver; the others are one step each,
    BIG_M the published form of the program, for reference on small graphs.
    """

    BEST = "best"
    LISTS = "lists"
    CRITICAL_PATH = "critical-path"
    BREADTH_FIRST = "breadth-first"
    PROGRAM = "program"
    BIG_M = "big-m"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSchedule:
    """A schedule of an instance.

    Attributes:
        starts: Per task, ticks.
        makespan: Ticks.
        bound: No schedule is shorter, ticks.
        source: The step that found it.
        seconds: Processor time of the search.
    """

    starts: Starts
    makespan: int
    bound: int
    source: str
    seconds: float

    @property
    def proved(self) -> bool:
        """Whether no schedule is shorter."""
        return self.makespan <= self.bound

    @property
    def gap(self) -> float:
        """Gap between makespan and proved bound, as a share of the makespan."""
        return relative_gap(self.makespan, self.bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSchedule:
    """A plan whose order is scheduled.

    Times use the durations that tasks have in the given plan. A tile that comes to be the first
    of its accumulator costs a little less then, so a simulation may differ by that.

    Attributes:
        plan: The plan with its tasks in the new order, which every rank issues.
        makespan_s: Of that order, seconds.
        bound_s: No order is shorter.
        proved: Whether the order is optimal, to the tick.
        source: The step that found it.
        seconds: Processor time of the search.
    """

    plan: Plan
    makespan_s: float
    bound_s: float
    proved: bool
    source: str
    seconds: float

    @property
    def gap(self) -> float:
        """Gap between makespan and proved bound, as a share of the makespan; ticks are rounded."""
        return relative_gap(self.makespan_s, self.bound_s)


def schedule_streams(
    plan: Plan,
    cluster: Cluster,
    *,
    method: Method = Method.BEST,
    time_limit_s: float = 2.0,
    seed: int = 0,
    log: bool = False,
) -> StreamSchedule:
    """Order a plan's tasks so that it ends early on a cluster; never later than as it is.

    Args:
        plan: A plan.
        cluster: Where it runs.
        method: How.
        time_limit_s: Processor seconds of the search, apart from the first lists.
        seed: Of random lists and of the solver.
        log: Let the solver print.
    """
    graph = graph_of(plan, cluster)
    tick_s = tick_of(graph)
    instance = stream_instance(graph, tick_s)
    found = search(instance, method=method, time_limit_s=time_limit_s, seed=seed, log=log)
    order = [task for task in instance.order(found.starts) if task < len(plan.tasks)]
    line, given = Timeline(graph, order), Timeline(graph)
    same = order == list(range(len(plan.tasks)))
    if method in (Method.BEST, Method.LISTS) and given.makespan <= line.makespan:
        line, same = given, True
    return StreamSchedule(
        plan=reordered(plan, issued_ahead(graph, line)),
        makespan_s=line.makespan,
        bound_s=min(found.bound * tick_s, line.makespan),
        proved=found.proved,
        source="plan" if same else found.source,
        seconds=found.seconds,
    )


def tick_of(graph: TaskGraph) -> float:
    """A tick such that the busiest stream is busy for about a million."""
    busy: dict[int, float] = {}
    for seconds, streams in zip(graph.seconds, graph.streams, strict=True):
        for stream in streams:
            busy[stream] = busy.get(stream, 0.0) + seconds
    return max(busy.values(), default=1.0) / _TICKS or 1.0


def stream_instance(graph: TaskGraph, tick_s: float) -> StreamInstance:
    """The instance of a graph in ticks, durations rounded down.

    The lag of a task is a task without a stream, after all others.
    """

    def ticks(seconds: float) -> int:
        return int(seconds / tick_s + 1e-6)

    durations, streams = [ticks(seconds) for seconds in graph.seconds], list(graph.streams)
    after, moves = list(graph.after), list(graph.moves)
    for task, lag_s in enumerate(graph.lags):
        if lag_s:
            durations.append(ticks(lag_s))
            streams.append(())
            after.append(after[task])
            moves.append(True)
            after[task] = (len(after) - 1,)
    return StreamInstance(tuple(durations), tuple(streams), tuple(after), tuple(moves))


# The search ---------------------------------------------------------------------------------


def search(
    instance: StreamInstance,
    *,
    method: Method = Method.BEST,
    time_limit_s: float = 2.0,
    seed: int = 0,
    log: bool = False,
) -> FoundSchedule:
    """Find starts for an instance; see the module."""
    begin = time.process_time()
    step = _Search(instance, begin + time_limit_s, seed, log)
    match method:
        case Method.CRITICAL_PATH:
            step.offer("critical path", critical_path(instance))
        case Method.BREADTH_FIRST:
            step.offer("breadth first", breadth_first(instance))
        case Method.LISTS:
            step.lists(1.0)
        case Method.PROGRAM:
            step.lists(0.1)
            step.program(cumulative)
        case Method.BIG_M:
            step.lists(0.1)
            step.program(big_m)
        case Method.BEST:
            step.lists(0.25)
            longest = max(map(len, instance.on_stream.values()), default=0)
            if len(instance.durations) <= FEW_TASKS or longest <= SHORT_STREAM:
                step.program(cumulative)
            else:
                step.windows()
    seconds = time.process_time() - begin
    return FoundSchedule(
        starts=step.starts,
        makespan=step.makespan,
        bound=step.bound,
        source=step.source,
        seconds=seconds,
    )


class _Search:
    def __init__(self, instance: StreamInstance, deadline: float, seed: int, log: bool) -> None:
        self.instance = instance
        self.deadline = deadline
        self.seed = seed
        self.log = log
        self.bound = instance.bound
        self.starts: Starts = ()
        self.makespan = -1
        self.source = ""

    @property
    def done(self) -> bool:
        return 0 <= self.makespan <= self.bound

    @property
    def left_s(self) -> float:
        return max(self.deadline - time.process_time(), 0.0)

    def offer(self, source: str, starts: Starts) -> None:
        """Take a schedule if it is shorter than the best."""
        makespan = self.instance.makespan(starts)
        if self.makespan < 0 or makespan < self.makespan:
            self.starts, self.makespan, self.source = starts, makespan, source

    def lists(self, share: float) -> None:
        """Try the fixed lists, then random ones for a share of the time that is left."""
        instance = self.instance
        for source, starts in self._fixed():
            self.offer(source, starts)
            if self.done:
                return
        self.offer("both ways", forward_backward(instance, self.starts))
        stop = time.process_time() + share * self.left_s
        for starts in random_lists(instance, self.seed):
            if self.done or time.process_time() >= stop:
                return
            self.offer("random lists", starts)

    def _fixed(self) -> Iterator[tuple[str, Starts]]:
        yield "strong tails", longest_tail_first(self.instance)
        yield "critical path", critical_path(self.instance)
        back = longest_tail_first(self.instance.mirrored)
        end = self.instance.mirrored.makespan(back)
        ends = [s + d for s, d in zip(back, self.instance.durations, strict=True)]
        order = self.instance.order(tuple(end - each for each in ends))
        yield "strong heads", self.instance.left_shifted(order)
        yield "breadth first", breadth_first(self.instance)

    def program(self, build: Builder) -> None:
        """Ask the solver, from the best schedule."""
        if self.done or not self.left_s:
            return
        ends = [0] * len(self.instance.durations)
        answer, starts = build(
            TimeWindow(self.instance, self.instance.heads, self.instance.tails, ends),
            self.starts,
            bound=self.bound,
            time_limit_s=self.left_s,
            seed=self.seed,
            log=self.log,
        )
        if starts is not None:
            self.offer("program", self.instance.left_shifted(self.instance.order(starts)))
        if answer.status in (SolverStatus.OPTIMAL, SolverStatus.FEASIBLE, SolverStatus.TIME_LIMIT):
            self.bound = min(max(self.bound, _up(answer.bound)), self.makespan)

    def windows(self) -> None:
        """Solve one window of time after another; larger ones when none gains any more."""
        self.starts = self.instance.left_shifted(self.instance.order(self.starts))
        for size in _WINDOWS:
            at, quiet = 0, 0
            while not self.done and self.left_s:
                order = self.instance.order(self.starts)
                places = max(1, -(-2 * len(order) // size) - 1)
                gained = self._window(order, at % places * size // 2, size)
                at += 1
                quiet = 0 if gained else quiet + 1
                if quiet >= places:
                    break

    def _window(self, order: Sequence[int], first: int, size: int) -> bool:
        """Order the tasks of a window anew; those before and after keep their order."""
        before, free, after = order[:first], order[first:][:size], order[first:][size:]
        window = time_window(self.instance, before, free, after)
        starts = tuple(self.starts[task] for task in free)
        _, better = cumulative(
            window,
            starts,
            bound=0,
            time_limit_s=min(_WINDOW_S, self.left_s),
            seed=self.seed,
            log=self.log,
        )
        if better is None:
            return False
        local = window.instance.order(better)
        whole = [*before, *(free[index] for index in local), *after]
        shorter = self.makespan
        self.offer("windows", self.instance.left_shifted(whole))
        return self.makespan < shorter


def _up(value: float) -> int:
    """The least whole number that is not below a bound, but for rounding."""
    return ceil(value - 1e-6) if isfinite(value) else 0

"""The simulator: when every task of a plan runs on a cluster, as a trace.

The quick clock is here: a discrete-event run over the plan's activities (`streams`), each of which
starts when all that it waits for has ended and its streams are free. On a cluster that was measured
`simulate` asks the full clock (`calibrated`) instead. There is no randomness, and no time of day:
equal input gives equal traces.
"""

from heapq import heapify, heappop, heappush

from harness.cluster.machine import Cluster, Runtime
from harness.cluster.presets import require
from harness.errors import CycleError
from harness.plan.residency import Program
from harness.plan.tasks import Free
from harness.simulate.calibrated import full_clock, timeline
from harness.simulate.queues import LINK_STREAMS, Stream, stream_of
from harness.simulate.streams import Dispatch, IssueOrder, Work, in_order, work_of
from harness.simulate.trace import Span, Trace, TraceSource, task_kind, trace_of


def simulate(
    program: Program,
    cluster: Cluster,
    *,
    runtime: Runtime = Runtime.GRAPH,
    dispatch: Dispatch = Dispatch.IN_ORDER,
    order: IssueOrder | None = None,
    peak_memory_bytes: tuple[int, ...] | None = None,
    work: Work | None = None,
) -> Trace:
    """Simulate a plan.

    On a measured cluster with first-in-first-out streams in the plan's order the full clock runs,
    in which all fitted effects count (see `calibrated.full_clock`); other orders, and datasheet
    clusters, have the quick one: costs of tasks and queues.

    Args:
        program: A verified, resolved plan (see `verify`).
        cluster: Where it runs; rank r on node r // gpus_per_node.
        runtime: GRAPH has no host overhead. EAGER serialises launches on each rank's host, in the
            order of issue; a launch never waits for the device.
        dispatch: How a stream picks its next task.
        order: Per rank, the order of issue; None is the plan's.
        peak_memory_bytes: Per rank, to be kept in the trace.
        work: What `work_of` made of the same arguments, if the caller has it; it gets edges.

    Raises:
        UnsupportedError: The plan has more ranks than the cluster has GPUs.
        CycleError: The order makes ranks wait for one another.
    """
    words = f"{runtime.value} runtime, {dispatch.value} streams"
    plain = work is None and order is None and dispatch is Dispatch.IN_ORDER
    fitted = full_clock(cluster, in_plan_order=plain)
    if fitted is None:
        work = work_of(program, cluster, runtime, order) if work is None else work
        if dispatch is Dispatch.IN_ORDER:
            in_order(work, order)
        spans, calibration = _spans(program, work, start_times(work)), cluster.calibration
    else:
        require(cluster, program.plan.problem.cp)
        spans, said = timeline(program, fitted, runtime=runtime)
        calibration = said.text
    return trace_of(
        program,
        spans,
        source=TraceSource.SIMULATED,
        machine=cluster.name,
        calibration=f"{calibration}; {words}",
        peak_memory_bytes=peak_memory_bytes,
    )


def start_times(work: Work) -> list[float]:
    """Run all activities; return when each starts.

    The heap holds what may start, keyed by (time, priority, number). What finds a stream taken
    goes back with the time when that stream is free.

    Raises:
        CycleError: Some activities wait for one another.
    """
    activities = work.activities
    waits, followers = [len(after) for after in work.after], _followers(work)
    ready, free = [a.release_s for a in activities], dict[int, float]()
    starts = [0.0] * len(activities)
    heap = [(a.release_s, a.priority, i) for i, a in enumerate(activities) if not waits[i]]
    heapify(heap)
    while heap:
        now, priority, index = heappop(heap)
        activity = activities[index]
        start = max((free.get(stream, 0.0) for stream in activity.streams), default=now)
        if start > now:
            heappush(heap, (start, priority, index))
            continue
        starts[index], end = now, now + activity.seconds
        free.update(dict.fromkeys(activity.streams, end))
        for follower in followers[index]:
            ready[follower] = max(ready[follower], end)
            waits[follower] -= 1
            if not waits[follower]:
                heappush(heap, (ready[follower], activities[follower].priority, follower))
    _check_all_ran(work, waits)
    return starts


def _followers(work: Work) -> list[list[int]]:
    followers: list[list[int]] = [[] for _ in work.activities]
    for index, after in enumerate(work.after):
        for earlier in after:
            followers[earlier].append(index)
    return followers


def _check_all_ran(work: Work, waits: list[int]) -> None:
    stuck = [index for index, count in enumerate(waits) if count]
    if stuck:
        task = work.activities[stuck[0]].task
        raise CycleError(
            "no ranks wait for one another",
            rank=None,
            task=task,
            detail=f"{len(stuck)} parts of tasks never start in this order",
        )


def _spans(program: Program, work: Work, starts: list[float]) -> list[Span]:
    tasks = program.plan.tasks
    kinds = [task_kind(task) for task in tasks]
    spans = [
        Span(launch.rank, Stream.LAUNCH, launch.task, "launch", launch.start_s, launch.end_s)
        for launch in work.launches
    ]
    for (task, numbers, seconds, _, priority, size), start in zip(
        work.activities, starts, strict=True
    ):
        if isinstance(tasks[task], Free):
            continue
        for number in numbers:
            rank, stream = stream_of(number)
            moves = stream in LINK_STREAMS
            kind = kinds[task] if moves or priority else "copy"
            end = start + seconds
            spans.append(Span(rank, stream, task, kind, start, end, size if moves else 0))
    return spans

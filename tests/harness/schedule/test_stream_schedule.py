"""Stream schedules: the tutorial's example, brute force, bounds, and orders that really run."""

from collections.abc import Iterator
from itertools import permutations, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cluster.presets import cluster, h100
from harness.plan.dependencies import reordered, topological
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.tasks import Tile, Transfer
from harness.schedule.list_schedules import (
    Starts,
    StreamInstance,
    breadth_first,
    critical_path,
    forward_backward,
    list_starts,
    longest_tail_first,
    random_lists,
)
from harness.schedule.scip import SolverStatus
from harness.schedule.stream_schedule import (
    FoundSchedule,
    Method,
    TimeWindow,
    big_m,
    cumulative,
    schedule_streams,
    search,
    time_window,
)
from harness.simulate.queues import STREAMS, Stream
from harness.simulate.simulator import simulate
from harness.simulate.timeline import TaskGraph, Timeline, issued_ahead
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import strategy

# The tutorial's example, microseconds: q3 and kv3 arrive on one stream, three kernels run on
# another, o3 leaves on a third. a1 waits for kv3, a2 for both, o3 for a2.
Q3, KV3, A0, A1, A2, O3 = range(6)
EXAMPLE = StreamInstance(
    durations=(20, 10, 10, 20, 10, 10),
    streams=((0,), (0,), (1,), (1,), (1,), (2,)),
    after=((), (), (), (KV3,), (Q3, KV3), (A2,)),
    moves=(True, True, False, False, False, True),
)


def makespan(order: tuple[int, ...]) -> int:
    return EXAMPLE.makespan(EXAMPLE.left_shifted(order))


def test_the_tutorials_example_takes_50_with_kv3_first_and_60_or_70_otherwise() -> None:
    assert makespan((KV3, Q3, A0, A1, A2, O3)) == 50
    assert makespan((Q3, KV3, A0, A2, O3, A1)) == 60
    assert makespan((Q3, KV3, A0, A1, A2, O3)) == 70


def test_every_step_finds_50_but_the_lists_that_fall_for_q3() -> None:
    assert EXAMPLE.bound == 50
    assert EXAMPLE.heads[A2] == 30  # q3 and kv3 come one after the other
    assert EXAMPLE.makespan(critical_path(EXAMPLE)) == 70
    assert EXAMPLE.makespan(breadth_first(EXAMPLE)) == 70
    for method in (Method.BEST, Method.LISTS):
        found = search(EXAMPLE, method=method)
        assert (found.makespan, found.bound, found.proved, found.gap) == (50, 50, True, 0.0)
        assert found.starts[KV3] == 0
    trap = breadth_first(EXAMPLE)
    whole = TimeWindow(EXAMPLE, EXAMPLE.heads, EXAMPLE.tails, [])
    for program in (cumulative, big_m):
        answer, starts = program(whole, trap, bound=0, time_limit_s=10, seed=0, log=False)
        assert answer.status is SolverStatus.OPTIMAL
        assert starts is not None
        EXAMPLE.check(starts)
        assert EXAMPLE.makespan(starts) == round(answer.value or 0) == 50


# Small instances ----------------------------------------------------------------------------


@st.composite
def instances(draw: st.DrawFn, most: int = 7) -> StreamInstance:
    """Transfers on two streams, kernels on one, delays on none."""
    count = draw(st.integers(1, most))
    seed = draw(st.integers(0, 1 << 30))
    return random_instance(count, ranks=draw(st.integers(1, 3)), seed=seed)


def random_instance(count: int, ranks: int, seed: int) -> StreamInstance:
    random = Random(seed)
    streams: list[tuple[int, ...]] = []
    for _ in range(count):
        src, dst = random.randrange(ranks), random.randrange(ranks)
        kind = random.choice("kkttn")
        streams.append({"k": (3 * src,), "t": (3 * src + 1, 3 * dst + 2), "n": ()}[kind])
    after = tuple(
        tuple(first for first in range(task) if random.random() < 1.5 / count)
        for task in range(count)
    )
    durations = tuple(random.choice((0, 1, 2, 3, 5, 9)) for _ in range(count))
    return StreamInstance(durations, tuple(streams), after, tuple(len(s) == 2 for s in streams))


def topological_orders(instance: StreamInstance) -> Iterator[tuple[int, ...]]:
    for order in permutations(range(len(instance.durations))):
        place = {task: at for at, task in enumerate(order)}
        if all(place[f] < place[t] for t, earlier in enumerate(instance.after) for f in earlier):
            yield order


@given(instances(6))
@settings(max_examples=30)
def test_the_program_is_as_good_as_trying_every_order(instance: StreamInstance) -> None:
    best = min(
        instance.makespan(instance.left_shifted(order)) for order in topological_orders(instance)
    )
    assert instance.bound <= best
    worst = instance.left_shifted(next(topological_orders(instance)))
    whole = TimeWindow(instance, instance.heads, instance.tails, [])
    for program in (cumulative, big_m):
        answer, starts = program(whole, worst, bound=0, time_limit_s=10, seed=0, log=False)
        assert starts is not None
        instance.check(starts)
        assert instance.makespan(starts) == best
        assert answer.bound == pytest.approx(best)
    found = search(instance, method=Method.BEST)
    assert (found.makespan, found.proved) == (best, True)


@given(instances(24))
def test_all_lists_are_schedules_and_none_beats_the_bound(instance: StreamInstance) -> None:
    lists: list[Starts] = [
        critical_path(instance),
        longest_tail_first(instance),
        breadth_first(instance),
    ]
    lists += [forward_backward(instance, lists[0])]
    lists += [starts for starts, _ in zip(random_lists(instance, 3), range(4), strict=False)]
    for starts in lists:
        instance.check(starts)
        assert instance.makespan(starts) >= instance.bound
        assert instance.makespan(starts) <= sum(instance.durations)
        shifted = instance.left_shifted(instance.order(starts))
        assert all(one <= other for one, other in zip(shifted, starts, strict=True))
    assert instance.makespan(lists[3]) <= instance.makespan(lists[0])


@given(instances(12))
def test_the_preemptive_bound_is_the_least_that_one_stream_allows(instance: StreamInstance) -> None:
    """Per stream: over all sets of its tasks, least head + sum of durations + least tail."""
    most = max(
        h + d + t
        for h, d, t in zip(instance.heads, instance.durations, instance.tails, strict=True)
    )
    for tasks in instance.on_stream.values():
        for chosen in product((False, True), repeat=len(tasks)):
            some = [task for task, take in zip(tasks, chosen, strict=True) if take]
            if some:
                most = max(
                    most,
                    min(instance.heads[t] for t in some)
                    + sum(instance.durations[t] for t in some)
                    + min(instance.tails[t] for t in some),
                )
    assert instance.bound == most


def test_a_list_takes_the_smallest_key_of_what_is_ready() -> None:
    three = StreamInstance((4, 4, 4), ((0,), (0,), (0,)), ((), (), (0,)), (False,) * 3)
    assert list_starts(three, [2.0, 1.0, 0.0]) == (4, 0, 8)
    assert list_starts(three, [0.0, 1.0, 0.5]) == (0, 8, 4)


def test_the_baselines_keys_grow_stale() -> None:
    """Tasks 1 and 2 are put in with the time known then; 1 keeps its place although 0 delays it."""
    stale = StreamInstance(
        durations=(10, 5, 7, 1),
        streams=((0,), (0,), (1,), (1,)),
        after=((), (), (), (1,)),
        moves=(False,) * 4,
    )
    assert breadth_first(stale) == (0, 10, 0, 15)
    late = StreamInstance(
        durations=(3, 1, 2, 4),
        streams=((0,), (1,), (0, 2), (2,)),
        after=((), (), (1,), (1,)),
        moves=(False,) * 4,
    )
    # 2 was put in with time 3, when stream 0 is free, 3 with time 1: 3 takes stream 2 first.
    assert breadth_first(late) == (0, 0, 5, 1)


# Windows ------------------------------------------------------------------------------------


@given(st.integers(0, 1000), st.integers(0, 30), st.integers(1, 12))
@settings(max_examples=25)
def test_a_better_window_makes_a_whole_that_is_as_good(seed: int, first: int, size: int) -> None:
    """What a window promises is what the whole order then takes."""
    instance = random_instance(36, ranks=3, seed=seed)
    starts = instance.left_shifted(instance.order(breadth_first(instance)))
    order = instance.order(starts)
    before, free, after = order[:first], order[first:][:size], order[first:][size:]
    window = time_window(instance, before, free, after)
    old = tuple(starts[task] for task in free)
    assert all(start >= head for start, head in zip(old, window.heads, strict=True))
    answer, better = cumulative(window, old, bound=0, time_limit_s=5, seed=0, log=False)
    assert better is not None
    whole = [*before, *(free[index] for index in window.instance.order(better)), *after]
    length = instance.makespan(instance.left_shifted(whole))
    assert length <= instance.makespan(starts)
    assert length >= round(answer.value or 0)


@given(st.integers(0, 1000), st.integers(0, 6))
@settings(max_examples=40)
def test_a_window_is_ordered_as_well_as_can_be(seed: int, first: int) -> None:
    instance = random_instance(11, ranks=2, seed=seed)
    starts = instance.left_shifted(instance.order(breadth_first(instance)))
    order = instance.order(starts)
    before, free, after = order[:first], order[first:][:5], order[first:][5:]
    window = time_window(instance, before, free, after)
    old = tuple(starts[task] for task in free)
    _, better = cumulative(window, old, bound=0, time_limit_s=5, seed=0, log=False)
    assert better is not None
    best = min(
        instance.makespan(instance.left_shifted([*before, *(free[at] for at in inside), *after]))
        for inside in topological_orders(window.instance)
    )
    whole = [*before, *(free[index] for index in window.instance.order(better)), *after]
    assert instance.makespan(instance.left_shifted(whole)) == best


def test_a_search_with_windows_ends_with_a_schedule_and_a_bound() -> None:
    large = random_instance(400, ranks=4, seed=5)
    found = search(large, time_limit_s=1.5)
    large.check(found.starts)
    assert large.makespan(found.starts) == found.makespan
    assert large.bound <= found.bound <= found.makespan
    assert found.makespan <= large.makespan(longest_tail_first(large))


def test_equal_seeds_give_equal_lists() -> None:
    instance = random_instance(60, ranks=4, seed=9)
    one, other = (next(random_lists(instance, 4)) for _ in range(2))
    assert one == other


# Plans --------------------------------------------------------------------------------------

CLUSTER = h100(1)
METHODS = (Method.BEST, Method.LISTS, Method.BREADTH_FIRST, Method.CRITICAL_PATH, Method.PROGRAM)

PROBLEM = Problem(
    pattern=make_pattern("causal", 6007),
    heads_q=8,
    heads_kv=2,
    head_dim=64,
    dtype=Dtype.BFLOAT16,
    cp=6,
)


@pytest.mark.parametrize("name", ["grid", "owner", "zigzag", "stripe", "usp:2x3", "allgather"])
@pytest.mark.parametrize("direction", Direction)
def test_a_scheduled_plan_is_proved_and_takes_what_was_promised(
    name: str, direction: Direction
) -> None:
    plan = strategy(name).plan(PROBLEM, direction)
    given_s = simulate(verify(plan), CLUSTER).makespan_s
    for method in METHODS:
        found = schedule_streams(plan, CLUSTER, method=method, time_limit_s=0.3)
        program = verify(found.plan)
        assert found.bound_s <= found.makespan_s
        assert 0 <= found.gap <= 1
        taken_s = simulate(program, CLUSTER).makespan_s
        if name not in ("usp:2x3", "allgather"):  # their collectives are simulated in parts
            assert taken_s == pytest.approx(found.makespan_s, rel=0.02)
            assert taken_s >= found.bound_s * 0.98
        if method in (Method.BEST, Method.LISTS):
            assert found.makespan_s <= given_s * 1.0001 or name in ("usp:2x3", "allgather")


def test_a_transfer_is_issued_before_the_kernel_that_runs_when_it_begins() -> None:
    compute, sending, receiving = (
        STREAMS.index(s) for s in (Stream.COMPUTE, Stream.NVLINK_OUT, Stream.NVLINK_IN)
    )
    other = len(STREAMS)
    first, kernel, second, last, there = range(5)
    graph = TaskGraph(
        seconds=[2.0, 10.0, 3.0, 4.0, 5.0],
        lags=[0.0] * 5,
        streams=[
            (sending, other + receiving),
            (compute,),
            (sending, other + receiving),
            (sending, other + receiving),  # what the kernel made: it cannot be sent before
            (other + compute,),
        ],
        after=[(), (), (), (kernel,), (second, last)],
        moves=[True, False, True, True, False],
    )
    order = [first, kernel, second, last, there]
    assert issued_ahead(graph, Timeline(graph, order)) == [first, second, kernel, last, there]
    line = [first, second, last]  # the kernel of the receiver runs while the second comes
    graph.streams[kernel] = (other + compute,)
    graph.after[last] = ()
    assert [task for task in issued_ahead(graph, Timeline(graph, order)) if task in line] == line
    assert issued_ahead(graph, Timeline(graph, order))[:3] == [first, second, last]


def test_where_the_order_stands_transfers_are_issued_ahead_too() -> None:
    problem = Problem(
        pattern=make_pattern("causal", 4096),
        heads_q=4,
        heads_kv=2,
        head_dim=64,
        dtype=Dtype.BFLOAT16,
        cp=3,
    )
    plan = strategy("owner").plan(problem, Direction.FORWARD)
    # Each rank's own tile first: the transfers beside it are listed behind it.
    first = [
        i
        for i in range(len(plan.tasks))
        if isinstance(plan.tasks[i], Tile) and not plan.tasks[i].after
    ]
    rest = [i for i in range(len(plan.tasks)) if i not in first]
    behind = reordered(plan, [*first, *rest])
    found = schedule_streams(behind, cluster("h100-1x8"), time_limit_s=0.0)
    assert found.source == "plan"
    kinds = [type(task) for task in found.plan.tasks]
    assert Transfer in kinds[: kinds.index(Tile)]


@pytest.mark.parametrize(
    ("first_s", "issued"),
    [
        (10.0, [2, 1, 3, 0]),  # the second begins as kernel 1 ends, and before kernel 0 is issued
        (12.0, [2, 1, 3, 0]),  # it begins while kernel 0 runs, which runs second
        (25.0, [2, 1, 0, 3]),  # no kernel runs by then
    ],
)
def test_it_is_issued_before_the_kernel_that_runs_by_then_only(
    first_s: float, issued: list[int]
) -> None:
    compute, sending, receiving = (
        STREAMS.index(s) for s in (Stream.COMPUTE, Stream.NVLINK_OUT, Stream.NVLINK_IN)
    )
    link = (sending, len(STREAMS) + receiving)
    graph = TaskGraph(
        seconds=[10.0, 10.0, first_s, 3.0],
        lags=[0.0] * 4,
        streams=[(compute,), (compute,), link, link],
        after=[(), (), (), ()],
        moves=[False, False, True, True],
    )
    assert issued_ahead(graph, Timeline(graph, [2, 1, 0, 3])) == issued


@given(st.integers(0, 1 << 30), st.integers(1, 30), st.integers(1, 3))
def test_issued_ahead_no_time_changes(seed: int, count: int, ranks: int) -> None:
    """On first-in-first-out streams, replayed here one task after another."""
    random = Random(seed)
    kinds = [STREAMS.index(s) for s in (Stream.COMPUTE, Stream.NVLINK_OUT, Stream.NVLINK_IN)]
    kernel = kinds[0]
    small = random_instance(count, ranks, seed)
    streams = [
        tuple(stream // 3 * len(STREAMS) + kinds[stream % 3] for stream in held)
        for held in small.streams
    ]
    graph = TaskGraph(
        seconds=[float(duration) for duration in small.durations],
        lags=[random.choice((0.0, 0.0, 0.5, 2.0)) for _ in range(count)],
        streams=streams,
        after=list(small.after),
        moves=list(small.moves),
    )
    order = topological(graph.after, [(random.random(),) for _ in range(count)])
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for at, task in enumerate(order):
        ready = max([ends[first] for first in graph.after[task]], default=0.0) + graph.lags[task]
        shares = [one for one in order[:at] if set(streams[one]) & set(streams[task])]
        starts[task] = max([ready, *(ends[one] for one in shares)])
        ends[task] = starts[task] + graph.seconds[task]
    line = Timeline(graph, order)
    assert dict(enumerate(line.end)) == ends
    assert line.makespan == max(ends.values())
    ahead = issued_ahead(graph, line)
    assert sorted(ahead) == list(range(count))
    place = {task: at for at, task in enumerate(ahead)}
    assert all(place[first] < place[task] for task in order for first in graph.after[task])
    assert Timeline(graph, ahead).end == line.end
    for task in order:
        waits = graph.after[task] or line.left[task]
        for other in order if graph.moves[task] and not waits else ():
            ranks_of = {stream // len(STREAMS) for stream in streams[task]}
            computes = [s for s in streams[other] if s % len(STREAMS) == kernel]
            here = any(stream // len(STREAMS) in ranks_of for stream in computes)
            if here and starts[other] < starts[task] < ends[other]:
                assert place[task] < place[other]


def test_scheduling_shortens_a_grid_that_stores_its_rows_first() -> None:
    plan = strategy("grid").plan(PROBLEM, Direction.BACKWARD)
    before_s = simulate(verify(plan), CLUSTER).makespan_s
    found = schedule_streams(plan, CLUSTER)
    after_s = simulate(verify(found.plan), CLUSTER).makespan_s
    assert after_s < 0.99 * before_s
    assert found.source != "plan"


@pytest.mark.slow
def test_ten_thousand_tasks_are_scheduled_in_half_a_minute() -> None:
    large = random_instance(10_000, ranks=64, seed=2)
    found: FoundSchedule = search(large, time_limit_s=20)
    large.check(found.starts)
    assert found.seconds <= 30

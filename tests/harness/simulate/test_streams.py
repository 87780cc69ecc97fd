"""Breaking plans into activities: which streams they hold, and in which order."""

from dataclasses import replace

import pytest

from harness.cluster.machine import Cluster, Runtime
from harness.cluster.presets import h100
from harness.errors import CycleError, UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.residency import Program, Step
from harness.plan.tasks import (
    Collective,
    Leg,
    Memory,
    Piece,
    Place,
    Tensor,
    Tile,
    Transfer,
    ranks_of,
)
from harness.simulate.queues import Stream, stream_of
from harness.simulate.simulator import simulate, start_times
from harness.simulate.streams import Dispatch, IssueOrder, in_order, plan_order, work_of
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import strategy


def nodes_of(width: int, nodes: int = 8) -> Cluster:
    return replace(h100(nodes), gpus_per_node=width)


def list_schedule(
    program: Program, cluster: Cluster, runtime: Runtime = Runtime.GRAPH
) -> tuple[tuple[int, ...], ...]:
    """Order each rank's tasks as list scheduling starts them (`Dispatch.GREEDY`).

    Returns:
        Per rank its tasks, in an order in which no ranks wait for one another: all sort by the
        same start times, and equal ones by the plan's order.
    """
    work = work_of(program, cluster, runtime)
    begun: dict[int, float] = {}
    ranks: list[set[int]] = [set() for _ in range(program.plan.problem.cp)]
    for activity, start in zip(work.activities, start_times(work), strict=True):
        begun[activity.task] = min(start, begun.get(activity.task, start))
        for stream in activity.streams:
            ranks[stream_of(stream)[0]].add(activity.task)
    return tuple(tuple(sorted(tasks, key=lambda t: (begun[t], t))) for tasks in ranks)


def runs_to_its_end(plan: Plan, order: IssueOrder) -> None:
    """Assert that ranks which issue their tasks so never wait for one another."""
    assert [sorted(tasks) for tasks in order] == [list(tasks) for tasks in plan_order(plan)]
    at, done = [0] * len(order), set[int]()
    while len(done) < len(plan.tasks):
        heads = {rank: order[rank][n] for rank, n in enumerate(at) if n < len(order[rank])}
        ready = {
            task
            for task in heads.values()
            if done.issuperset(plan.tasks[task].after)
            and all(heads.get(rank) == task for rank in ranks_of(plan.tasks[task]))
        }
        assert ready, f"ranks wait for one another: they are at {heads}"
        done |= ready
        at = [n + (heads.get(rank) in ready) for rank, n in enumerate(at)]


def planned(
    name: str,
    pattern: str = "causal",
    cp: int = 4,
    direction: Direction = Direction.FORWARD,
    heads: int = 8,
) -> Program:
    problem = Problem(
        pattern=make_pattern(pattern, 512 * cp),
        heads_q=heads,
        heads_kv=heads,
        head_dim=64,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )
    return verify(strategy(name).plan(problem, direction))


def moving(src: Place, dst: Place) -> Program:
    problem = Problem(pattern=make_pattern("full", 8), heads_q=1, heads_kv=1, head_dim=8, cp=4)
    task = Transfer(Leg(src, dst, (Piece(Tensor.K, (0,), 1),)))
    plan = Plan(problem, "", Direction.FORWARD, (range(8),), (range(8),), (), (task,), ())
    return Program(plan, (), (Step(set(), [], []),), frozenset(), 0, {})


@pytest.mark.parametrize(
    ("src", "dst", "held"),
    [
        (Place(0), Place(1), [(0, Stream.NVLINK_OUT), (1, Stream.NVLINK_IN)]),
        (Place(1), Place(2), [(1, Stream.NIC_OUT), (2, Stream.NIC_IN)]),
        (Place(2), Place(2, Memory.HOST), [(2, Stream.HOST_OUT)]),
        (Place(2, Memory.HOST), Place(2), [(2, Stream.HOST_IN)]),
    ],
)
def test_a_leg_holds_both_ports_of_its_link(
    src: Place, dst: Place, held: list[tuple[int, Stream]]
) -> None:
    work = work_of(moving(src, dst), nodes_of(2), Runtime.GRAPH)

    assert held == [stream_of(number) for number in work.activities[0].streams]


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="must not exceed its 2 GPUs"):
        work_of(planned("ring"), nodes_of(2, nodes=1), Runtime.GRAPH)


@pytest.mark.parametrize(
    ("width", "cp", "name"),
    [
        (4, 4, "ulysses"),
        (4, 8, "ulysses"),
        (2, 8, "ulysses"),
        (4, 6, "allgather"),
        (8, 8, "usp:4x2"),
    ],
)
def test_legs_of_a_collective_leave_no_port_waiting(width: int, cp: int, name: str) -> None:
    """Every rank sends and receives equally much over each link class without a gap."""
    program = planned(name, "full", cp)
    cluster = nodes_of(width)
    work = work_of(program, cluster, Runtime.GRAPH)
    in_order(work)
    first = program.plan.tasks[0]
    assert isinstance(first, Collective)
    starts = start_times(work)
    ends: dict[int, float] = {}
    loads: dict[int, float] = {}
    for activity, start in zip(work.activities, starts, strict=True):
        if activity.task == 0:
            for number in activity.streams:
                ends[number] = max(ends.get(number, 0.0), start + activity.seconds)
                loads[number] = loads.get(number, 0.0) + activity.seconds
    latency = work.activities[0].seconds
    for number, end in ends.items():
        if stream_of(number)[1] is not Stream.COMPUTE and loads[number] == max(
            load for other, load in loads.items() if stream_of(other)[1] is stream_of(number)[1]
        ):
            assert end == pytest.approx(latency + loads[number], rel=1e-9), stream_of(number)


def test_streams_run_first_in_first_out_in_the_order_of_the_plan() -> None:
    program = planned("zigzag", cp=8, direction=Direction.BACKWARD)
    trace = simulate(program, nodes_of(4))
    by_stream: dict[tuple[int, Stream], list[int]] = {}
    for span in trace.spans:
        by_stream.setdefault((span.rank, span.stream), []).append(span.task)

    assert all(tasks == sorted(tasks) for tasks in by_stream.values())


def test_a_given_order_is_kept() -> None:
    program = planned("double_ring:inner=2", cp=4, direction=Direction.BACKWARD)
    order = list_schedule(program, nodes_of(2))
    assert order != plan_order(program.plan)
    trace = simulate(program, nodes_of(2), order=order)
    for rank, tasks in enumerate(order):
        place = {task: at for at, task in enumerate(tasks)}
        for stream in Stream:
            done = [s.task for s in trace.spans if (s.rank, s.stream) == (rank, stream)]
            assert done == sorted(done, key=place.__getitem__)


def test_an_order_in_which_ranks_wait_for_one_another_is_refused() -> None:
    program = planned("ring", "full", cp=2)
    order = [list(tasks) for tasks in plan_order(program.plan)]
    tasks = program.plan.tasks
    mine = [t for t in order[0] if isinstance(tasks[t], Tile)]
    # Rank 0 attends the visitor first, which is fine; the finish before both is not.
    order[0].remove(order[0][-1])
    order[0].insert(order[0].index(mine[0]), len(tasks) - 2)
    with pytest.raises(CycleError, match="never start"):
        simulate(program, nodes_of(2), order=order)


@pytest.mark.parametrize("name", ["ring", "zigzag", "double_ring:inner=2", "usp:2x2", "ulysses"])
@pytest.mark.parametrize("direction", list(Direction))
def test_a_list_schedule_is_a_schedule(name: str, direction: Direction) -> None:
    program = planned(name, cp=4, direction=direction)

    runs_to_its_end(program.plan, list_schedule(program, nodes_of(2)))


def test_equal_start_times_keep_the_order_of_the_plan() -> None:
    """Kernels so short that what follows them starts at the same time."""
    base = nodes_of(4)
    gpu = replace(
        base.gpu, flops_per_s=1e300, memory_bandwidth_bytes_per_s=1e300, kernel_start_s=0.0
    )
    nvlink = replace(base.nvlink, latency_s=1.0, bandwidth_bytes_per_s=1e300)
    program = planned("ring", "full")
    order = list_schedule(program, replace(base, gpu=gpu, nvlink=nvlink))

    runs_to_its_end(program.plan, order)


def test_local_copies_of_a_collective_are_named_and_cross_no_link() -> None:
    trace = simulate(planned("ulysses", "full"), nodes_of(4))
    copies = [span for span in trace.spans if span.kind == "copy"]

    # q, k, v and out, on each of four ranks
    assert len(copies) == 16
    assert {(span.stream, span.size_bytes) for span in copies} == {(Stream.COMPUTE, 0)}
    assert {s.kind for s in trace.spans if s.stream is Stream.NVLINK_IN} == {"all_to_all"}


@pytest.mark.parametrize("name", ["ring", "zigzag", "stripe", "double_ring:inner=2"])
@pytest.mark.parametrize("direction", list(Direction))
def test_running_a_list_schedule_in_order_takes_as_long_as_list_scheduling(
    name: str, direction: Direction
) -> None:
    program, cluster = planned(name, cp=8, direction=direction), nodes_of(2)
    greedy = simulate(program, cluster, dispatch=Dispatch.GREEDY)
    again = simulate(program, cluster, order=list_schedule(program, cluster))

    assert again.makespan_s == pytest.approx(greedy.makespan_s, rel=1e-12)


def test_transfers_come_first_at_equal_times() -> None:
    program = planned("ring", "full", cp=2)
    work = work_of(program, nodes_of(2), Runtime.GRAPH)
    kinds = [type(program.plan.tasks[activity.task]) for activity in work.activities]

    assert {(Transfer, 0), (Tile, 1)} <= {
        (kind, activity.priority) for kind, activity in zip(kinds, work.activities, strict=True)
    }


def test_eager_launches_follow_one_another_and_kernels_wait_for_theirs() -> None:
    program = planned("ring", "causal", cp=4)
    cluster = replace(nodes_of(4), host_launch_s=1e-3)
    trace = simulate(program, cluster, runtime=Runtime.EAGER)
    launched: dict[tuple[int, int], float] = {}
    for rank in range(4):
        spans = [s for s in trace.spans if (s.rank, s.stream) == (rank, Stream.LAUNCH)]
        assert [s.task for s in spans] == list(plan_order(program.plan)[rank])
        assert [s.end_s for s in spans] == pytest.approx(
            [1e-3 * (n + 1) for n in range(len(spans))]
        )
        launched |= {(rank, s.task): s.end_s for s in spans}
    for span in trace.spans:
        if span.stream is not Stream.LAUNCH:
            assert span.start_s >= launched[span.rank, span.task]


def test_a_launch_never_waits_for_the_device() -> None:
    """With long kernels the host runs ahead, and eager costs only the first launches."""
    program = planned("zigzag", "full", cp=4)
    slow = replace(nodes_of(4), gpu=replace(nodes_of(4).gpu, flops_per_s=1e10))
    graph = simulate(program, slow).makespan_s
    eager = simulate(program, slow, runtime=Runtime.EAGER).makespan_s

    assert graph < eager < graph + 4 * slow.host_launch_s

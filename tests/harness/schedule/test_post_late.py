"""When the ends of transfers are posted: edges that keep streams' order and the plan's time."""

import pytest

from harness.cluster.presets import cluster
from harness.plan.problem import Direction
from harness.plan.tasks import Transfer, ranks_of
from harness.prepare.planner_context import context_on
from harness.schedule.post_late import gates_of, posted_late
from harness.simulate.queues import STREAMS, Stream
from harness.simulate.simulator import simulate
from harness.simulate.timeline import TaskGraph, Timeline
from harness.verify.proof import verify
from strategies import strategy
from tests.support import problem

COMPUTE, OUT, IN = (STREAMS.index(s) for s in (Stream.COMPUTE, Stream.NVLINK_OUT, Stream.NVLINK_IN))
HERE, THERE, ELSEWHERE = 0, len(STREAMS), 2 * len(STREAMS)


def graph(made_s: float, tiles: list[float], other_s: float = 0.0) -> TaskGraph:
    """A kernel and what it sends (1 s), the receiver's kernels, and its last, which needs it."""
    count = len(tiles)
    return TaskGraph(
        seconds=[made_s, 1.0, *tiles, 1.0, other_s],
        lags=[0.0] * (count + 4),
        streams=[
            (HERE + COMPUTE,),
            (HERE + OUT, THERE + IN),
            *[(THERE + COMPUTE,)] * (count + 1),
            (ELSEWHERE + COMPUTE,),
        ],
        after=[(), (0,), *[()] * count, (1,), ()],
        moves=[False, True, *[False] * (count + 2)],
    )


SENT, FIRST, SECOND, THIRD = 1, 2, 3, 4


@pytest.mark.parametrize(
    ("made_s", "tiles", "other_s", "gates"),
    [
        (2.0, [1.0, 1.0, 1.0, 1.0], 0.0, (SECOND,)),  # as in the picture
        (2.8, [1.0, 1.0, 1.0, 1.0], 0.0, (THIRD,)),  # it can come behind the third in time
        (2.8, [1.0, 1.0, 1.0], 0.0, (SECOND,)),  # not if it were late then
        (3.0, [4.0], 0.0, ()),  # nothing ends before, and behind it is too late
        (3.0, [4.0], 9.0, (FIRST,)),  # but not where something else takes longer
        (1.0, [4.0], 9.0, ()),  # where the sender would wait for longer than the receiver does
        (0.0, [1.0, 1.0], 0.0, ()),  # at once: nobody waits
    ],
)
def test_a_transfer_is_posted_behind_the_kernel_that_ends_before_it_begins(
    made_s: float, tiles: list[float], other_s: float, gates: tuple[int, ...]
) -> None:
    tasks = graph(made_s, tiles, other_s)
    order = list(range(len(tasks.seconds)))
    found, posted = gates_of(tasks, order, {SENT: (0, 1)})
    assert found == ({SENT: gates} if gates else {})
    tasks.after[SENT] += gates
    assert Timeline(tasks, posted).makespan == Timeline(graph(made_s, tiles, other_s)).makespan


def test_what_is_behind_it_on_the_same_port_counts_too() -> None:
    """Behind the tile of 4 s it would be in time itself, but another would arrive too late."""
    tasks = graph(3.0, [4.0], 9.0)
    another = len(tasks.seconds)
    tasks.seconds += [3.5, 1.0]
    tasks.lags += [0.0, 0.0]
    tasks.streams += [(2 * len(STREAMS) + OUT, THERE + IN), (THERE + COMPUTE,)]
    tasks.after += [(), (another,)]
    tasks.moves += [True, False]
    order = list(range(len(tasks.seconds)))
    assert gates_of(tasks, order, {SENT: (0, 1)})[0] == {}
    tasks.seconds[another] = 0.5
    assert gates_of(tasks, order, {SENT: (0, 1)})[0] == {SENT: (FIRST,)}


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("name", "pattern"), [("grid:rows=2", "full"), ("owner", "star")])
def test_edges_for_posting_keep_a_plan_right_and_its_time(
    name: str, pattern: str, direction: Direction
) -> None:
    machine = cluster("h100-2x8")
    plan = strategy(name).plan(problem(pattern, 1021, (6, 2), cp=4), direction)
    late = posted_late(plan, machine)
    before, after = (simulate(verify(each), machine).makespan_s for each in (plan, late))
    assert after == pytest.approx(before, rel=1e-8)
    more = 0
    for index, task in enumerate(late.tasks):
        if isinstance(task, Transfer):
            for earlier in task.after:
                ends = set(ranks_of(late.tasks[earlier]))
                more += task.leg.dst.rank in ends and task.leg.src.rank not in ends
        assert all(earlier < index for earlier in task.after)
    assert more or direction is Direction.FORWARD


def test_where_nothing_is_held_nothing_is_put_off() -> None:
    plan = strategy("grid:rows=2").plan(problem("full", 1021, cp=4), Direction.BACKWARD)
    assert posted_late(plan, cluster("local-cpu")) is plan


def test_late_posting_saves_time_where_what_waits_holds_sms() -> None:
    machine = cluster("h100-hamming")
    context = context_on(machine)
    assert context.evaluate is not None
    p = problem("full", 65536, (8, 2), dims=(128, 128), cp=16)
    plan = strategy("grid:rows=4").plan(p, Direction.BACKWARD)
    assert context.evaluate(posted_late(plan, machine)) < context.evaluate(plan)

"""Passes: what they make is proved and right, they refuse what no kernel takes, and they pay."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cluster.machine import Cluster, Link
from harness.cluster.presets import H100_SXM, h100
from harness.errors import CycleError
from harness.plan.dependencies import needs, rebuilt, reordered, topological
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.sharding import Sharding, split, zigzag
from harness.plan.tasks import Collective, CollectiveKind, Merge, Tensor, Tile, Transfer, legs_of
from harness.planning.block_assignment import Allocation
from harness.planning.block_transfers import plan_allocation
from harness.schedule import batch, fuse
from harness.schedule.batch import batched
from harness.schedule.collectives import together
from harness.schedule.fuse import fused, fused_at_once
from harness.schedule.greedy import Replacement, TimedPlan, improve
from harness.schedule.kernel_tiling import REPLACEMENT_FINDERS, tile_kernels
from harness.schedule.substitute import Members, substituted
from harness.simulate.simulator import simulate
from harness.simulate.timeline import Timeline, graph_of
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import STRATEGIES, quick, strategy
from tests.fixtures.plans import fpdt
from tests.harness.numeric import table_pattern, wrong
from tests.harness.planning.test_block_transfers import cases

ALL = REPLACEMENT_FINDERS
CLUSTER = h100(1)


def with_collectives(plan: Plan, groups: Iterable[Members]) -> Plan:
    """Replace each group of transfers by one collective.

    Raises:
        ValueError: A group is not transfers, or what arrives at one rank does not join.
        CycleError: A transfer of a group waits for a task that waits for another of the group.
    """
    replacements = {}
    for members in groups:
        moves = [task for task in (plan.tasks[i] for i in members) if isinstance(task, Transfer)]
        if len(moves) != len(members):
            raise ValueError(f"collectives: tasks {list(members)} must be transfers")
        replacements[members] = together(moves)
    return substituted(plan, replacements)


def tiles(plan: Plan) -> list[int]:
    return [index for index, task in enumerate(plan.tasks) if isinstance(task, Tile)]


def seconds(plan: Plan, cluster: Cluster) -> float:
    return simulate(verify(plan), cluster).makespan_s


def slow_start(cluster: Cluster, start_s: float) -> Cluster:
    return replace(cluster, gpu=replace(cluster.gpu, kernel_start_s=start_s))


# The figure of the paper --------------------------------------------------------------------

# Rank 2 has Q2 (two chunks) against KV2 and KV3 (two chunks each), and one chunk of Q3 against
# KV3: blocks B0..B9. It owns Q2 and KV2; Q3 and KV3 are rank 3's.
FIGURE = [[0] * 8 for _ in range(8)]
for _row, _columns in ((4, range(4, 8)), (5, range(4, 8)), (6, range(6, 8))):
    for _column in _columns:
        FIGURE[_row][_column] = 1
FIGURE_CHUNK = 1024
BLOCK_S = 100e-6
"""Seconds of one block: kernels and links of the cluster below are made to fit."""


def figure() -> tuple[Plan, Cluster]:
    """The plan of rank 2's ten blocks, on a machine where kernels are worth fusing."""
    seqlen = 8 * FIGURE_CHUNK
    problem = Problem(
        pattern=table_pattern(FIGURE, seqlen, seqlen),
        heads_q=8,
        heads_kv=8,
        head_dim=64,
        dtype=Dtype.BFLOAT16,
        cp=4,
    )
    sharding = Sharding(split(seqlen, 8), ((0, 1), (2, 3), (4, 5), (6, 7)))
    cells = tuple(tuple(2 if cell else None for cell in row) for row in FIGURE)
    allocation = Allocation(queries=sharding, keys=sharding, cells=cells)
    plan = plan_allocation(problem, "figure 5", Direction.FORWARD, allocation)
    flops = 4 * FIGURE_CHUNK**2 * problem.heads_q * problem.head_dim
    chunk_bytes = FIGURE_CHUNK * problem.heads_q * problem.head_dim * 2
    gpu = replace(
        H100_SXM,
        flops_per_s=flops / BLOCK_S / H100_SXM.efficiency_forward,
        memory_bandwidth_bytes_per_s=1e20,  # folding costs nothing
        kernel_start_s=BLOCK_S / 10,
    )
    # All that rank 2 gets is there when its four own blocks are done, and not before.
    link = Link(bandwidth_bytes_per_s=chunk_bytes / BLOCK_S / 0.74, latency_s=BLOCK_S / 10)
    return plan, replace(CLUSTER, gpu=gpu, nvlink=link)


def blocks(plan: Plan) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return sorted((task.q, task.kv) for task in plan.tasks if isinstance(task, Tile))


def test_ten_blocks_become_the_three_kernels_of_the_figure() -> None:
    plan, cluster = figure()
    assert len(blocks(plan)) == 10

    better = tile_kernels(plan, cluster)

    verify(better.plan)
    assert blocks(better.plan) == [((4, 5), (4, 5)), ((4, 5), (6, 7)), ((6,), (6, 7))]
    keys = {
        piece.chunks
        for task in better.plan.tasks
        for leg in legs_of(task)
        if leg.dst.rank == 2
        for piece in leg.pieces
        if piece.tensor is Tensor.K
    }
    assert keys == {(6, 7)}  # KV3,0 and KV3,1 come as one
    assert seconds(better.plan, cluster) == pytest.approx(better.after_s)
    assert better.after_s < better.before_s


def test_the_largest_rectangle_is_tried_and_given_up_when_it_waits_too_long() -> None:
    plan, cluster = figure()
    timed = TimedPlan(plan, cluster)
    by_gain = sorted(fuse.fused_tiles(timed), key=lambda each: -each.gain_s)
    assert isinstance(by_gain[0].task, Tile)
    assert (by_gain[0].task.q, by_gain[0].task.kv) == ((4, 5), (4, 5, 6, 7))
    assert by_gain[0].gain_s == pytest.approx(7 * BLOCK_S / 10, rel=1e-3)
    whole = fused(plan, [by_gain[0].members])
    assert seconds(whole, cluster) > seconds(plan, cluster)


# Each pass ----------------------------------------------------------------------------------


def pair(name: str, problem: Problem) -> list[Plan]:
    return [strategy(name).plan(problem, direction) for direction in Direction]


def problem(pattern: str = "full", cp: int = 4, seqlen: int = 43, kv: int | None = None) -> Problem:
    return Problem(
        pattern=make_pattern(pattern, seqlen, kv or seqlen, cross=kv is not None),
        heads_q=6,
        heads_kv=2,
        head_dim=8,
        batch=2,
        dtype=Dtype.FLOAT64,
        cp=cp,
    )


def test_fusing_rows_and_columns_that_are_no_neighbours_gives_one_right_tile() -> None:
    grid = Allocation(
        queries=Sharding(split(43, 6), ((0, 1), (2, 3), (4, 5))),
        keys=Sharding(split(31, 4), ((0,), (1, 2), (3,))),
        cells=((2, 0, 2, 2), (1, 1, 0, 0), (2, 1, 2, 2), (0, 1, 0, 0), (2, 2, 2, 2), (1, 0, 1, 1)),
    )
    plans = []
    for direction in Direction:
        plan = plan_allocation(problem(cp=3, kv=31), "by hand", direction, grid)
        group = tuple(
            index
            for index in tiles(plan)
            if (task := plan.tasks[index]).place.rank == 2 and task.kv[0] != 1
        )
        assert len(group) == 9
        plans.append(fused(plan, [group]))
        assert ((0, 2, 4), (0, 2, 3)) in blocks(plans[-1])
    assert not wrong(*plans)


def test_a_triangle_of_blocks_is_one_call() -> None:
    plans = []
    for plan in pair("owner:placement=zigzag", problem("causal", cp=2)):
        own = {
            (task.q, task.kv): index
            for index, task in enumerate(plan.tasks)
            if isinstance(task, Tile) and task.place.rank == 1
        }
        group = tuple(own[(i,), (j,)] for i, j in ((1, 1), (2, 1), (2, 2)))
        plans.append(fused(plan, [group]))
    assert not wrong(*plans)


def test_fusing_refuses_what_is_no_rectangle_or_more_than_one_call() -> None:
    plan, _ = pair("owner:placement=zigzag", problem("causal", cp=2))
    own = {
        (task.place.rank, task.q, task.kv): index
        for index, task in enumerate(plan.tasks)
        if isinstance(task, Tile)
    }
    one, two, three = (own[1, (i,), (j,)] for i, j in ((1, 1), (2, 1), (2, 2)))
    with pytest.raises(ValueError, match="of its 473 pairs"):
        fused(plan, [(one, three, own[1, (2,), (0,)])])
    with pytest.raises(ValueError, match="one place that fill a rectangle"):
        fused(plan, [(two, own[0, (0,), (0,)])])
    with pytest.raises(ValueError, match="one kernel call can take"):
        fused(plan, [(two, three, own[1, (2,), (0,)])])  # a triangle that starts at no corner


def test_a_group_that_would_wait_for_itself_is_refused() -> None:
    """A ring's keys go on from where they arrived, directly or after gradients have passed."""
    plan = strategy("ring").plan(problem("full", cp=3), Direction.BACKWARD)
    moves = [index for index, task in enumerate(plan.tasks) if isinstance(task, Transfer)]
    waits = needs(plan)
    keys = [i for i in moves if plan.tasks[i].leg.pieces[0].tensor is Tensor.K]
    next_to = next((first, second) for second in keys for first in waits[second])
    with pytest.raises(CycleError):
        with_collectives(plan, [next_to])
    line = Timeline(graph_of(plan, CLUSTER))
    before = list(line.end)
    assert line.replace(next_to, 1.0, (), late=True) is None
    with pytest.raises(CycleError):
        with_collectives(plan, [(moves[0], moves[-1])])
    assert line.replace((moves[0], moves[-1]), 1.0, (), late=True) is None
    assert before == line.end


@pytest.mark.parametrize("name", [quick(name) for name in STRATEGIES])
@pytest.mark.parametrize("cp", [3, 4])
def test_every_strategys_plan_can_be_improved_and_stays_right(name: str, cp: int) -> None:
    plans = []
    for plan in pair(name, problem("causal", cp=cp)):
        better = improve(plan, slow_start(CLUSTER, 1e-3), ALL)
        before_s, after_s = (
            seconds(each, slow_start(CLUSTER, 1e-3)) for each in (plan, better.plan)
        )
        assert after_s <= before_s * (1 + 1e-9)
        plans.append(better.plan)
    assert not wrong(*plans)


@pytest.mark.parametrize("placement", ["zigzag", "contiguous"])
def test_batches_bring_the_same_bytes_in_fewer_transfers(placement: str) -> None:
    plans = []
    for plan in pair(f"owner:placement={placement}", problem("causal", cp=3)):
        ways: dict[tuple[int, int, bool], list[int]] = {}
        for index, task in enumerate(plan.tasks):
            if isinstance(task, Transfer):
                leg = task.leg
                key = leg.src.rank, leg.dst.rank, leg.pieces[0].tensor.is_part
                ways.setdefault(key, []).append(index)
        groups = [tuple(members) for members in ways.values()]
        fewer = batched(plan, groups)
        assert sum(isinstance(task, Transfer) for task in fewer.tasks) == len(groups)
        assert _bytes(plan) == _bytes(fewer)
        plans.append(fewer)
    assert not wrong(*plans)


def _bytes(plan: Plan) -> Counter[tuple[int, int, Tensor]]:
    """Tokens x heads by source, destination and tensor."""
    found: Counter[tuple[int, int, Tensor]] = Counter()
    for task in plan.tasks:
        for leg in legs_of(task):
            for piece in leg.pieces:
                size = plan.tokens(piece) * piece.heads.bit_count()
                found[leg.src.rank, leg.dst.rank, piece.tensor] += size
    return found


def test_batching_refuses_other_ways() -> None:
    plan, _ = pair("owner", problem("causal", cp=3))
    moves = [index for index, task in enumerate(plan.tasks) if isinstance(task, Transfer)]
    with pytest.raises(ValueError, match="one source, destination"):
        batched(plan, [tuple(moves[:2])])
    with pytest.raises(ValueError, match="one source, destination"):
        batched(plan, [(moves[0], tiles(plan)[0])])
    plan, _ = pair("owner:placement=zigzag", problem("full", cp=3))
    first, second = (
        index
        for index, task in enumerate(plan.tasks)
        if isinstance(task, Transfer) and (task.leg.src.rank, task.leg.dst.rank) == (0, 1)
    )
    with pytest.raises(ValueError, match="is in two groups"):
        batched(plan, [(first, second), (second, first)])


def test_transfers_become_the_collective_that_does_the_same() -> None:
    forward, backward = pair("grid:rows=2", problem(cp=6, seqlen=47))
    kinds = []
    plans = []
    for plan in (forward, backward):
        groups: dict[tuple[object, ...], list[int]] = {}
        for index, task in enumerate(plan.tasks):
            if isinstance(task, Transfer):
                leg = task.leg
                tensor = leg.pieces[0].tensor
                line = leg.src.rank // 3 if not tensor.on_kv else leg.src.rank % 3
                groups.setdefault((tensor, line), []).append(index)
        whole = with_collectives(plan, map(tuple, groups.values()))
        assert _bytes(plan) == _bytes(whole)
        assert not any(isinstance(task, Transfer) for task in whole.tasks)
        kinds.append(
            {
                (task.legs[0].pieces[0].tensor, task.kind)
                for task in whole.tasks
                if isinstance(task, Collective)
            }
        )
        plans.append(whole)
    gather, scatter = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
    assert kinds[0] == {
        (Tensor.Q, gather),
        (Tensor.K, gather),
        (Tensor.OUT_PART, CollectiveKind.ALL_TO_ALL),  # never summed on the way
    }
    assert kinds[1] == {
        (Tensor.Q, gather),
        (Tensor.K, gather),
        (Tensor.DQ_PART, scatter),
        (Tensor.DK_PART, scatter),
    }
    assert not wrong(*plans)


def test_at_once_takes_the_largest_rectangles_whether_it_pays_or_not() -> None:
    plan, cluster = figure()
    rank = fused_at_once(plan)
    assert blocks(rank) == [((4, 5), (4, 5)), ((4, 5, 6), (6, 7))]
    assert seconds(rank, cluster) > seconds(plan, cluster)
    plans = []
    for one in pair("owner", problem("causal", cp=6)):
        whole = fused_at_once(one)  # at most ceil(6 * 5 / 2 / 6) = 3 blocks, no diagonal ones
        sizes = [len(t.q) * len(t.kv) for t in whole.tasks if isinstance(t, Tile)]
        assert sorted(sizes) == sorted([1] * 6 + [1, 2, 3, 3, 1, 3, 2])
        plans.append(whole)
    assert not wrong(*plans)


# Order --------------------------------------------------------------------------------------


@given(st.sampled_from(sorted(map(quick, STRATEGIES))), st.sampled_from(Direction), st.randoms())
def test_tasks_in_any_order_of_their_true_needs_are_proved(
    name: str, direction: Direction, random: object
) -> None:
    plan = strategy(name).plan(problem("causal", cp=3), direction)
    keys = [(random.random(),) for _ in plan.tasks]
    verify(reordered(plan, topological(needs(plan), keys)))


@given(st.sampled_from((fpdt.forward, fpdt.backward)), st.randoms())
def test_what_is_freed_and_fetched_again_keeps_its_order(
    make: Callable[[], Plan], random: object
) -> None:
    plan = make()
    keys = [(random.random(),) for _ in plan.tasks]
    verify(reordered(plan, topological(needs(plan), keys)))


def test_a_row_goes_home_without_waiting_for_what_became_of_its_neighbours() -> None:
    """Rank 1 computes rows 0 and 2 of ranks 0 and 2 in one tile, and row 2 once more."""
    sharding = Sharding(split(43, 3), ((0,), (1,), (2,)))
    allocation = Allocation(
        queries=sharding, keys=sharding, cells=((1, 0, 0), (1, 1, 1), (1, 1, 2))
    )
    plan = plan_allocation(problem(cp=3), "by hand", Direction.FORWARD, allocation)
    at = {(task.q, task.kv): i for i, task in enumerate(plan.tasks) if isinstance(task, Tile)}
    plan = fused(plan, [(at[(0,), (0,)], at[(2,), (0,)])])
    both, later = (
        next(i for i, t in enumerate(plan.tasks) if isinstance(t, Tile) and (t.q, t.kv) == block)
        for block in (((0, 2), (0,)), ((2,), (1,)))
    )
    home = {
        task.leg.pieces[0].chunks: task.after
        for task in plan.tasks
        if isinstance(task, Transfer) and task.leg.pieces[0].tensor.is_part
    }
    assert home == {(0,): (both,), (2,): (later,)}
    assert both < later


def test_tiles_of_one_accumulator_need_no_order_but_their_merge_comes_after() -> None:
    plan = strategy("grid:rows=2").plan(problem(cp=4), Direction.FORWARD)
    waits = needs(plan)
    for index in tiles(plan):
        assert not any(isinstance(plan.tasks[first], Tile) for first in waits[index])
    for index, task in enumerate(plan.tasks):
        if isinstance(task, Merge):
            assert waits[index]
    with pytest.raises(ValueError, match="wait for one another"):
        topological([(1,), (0,)], [(0.0,), (0.0,)])


# Greedy choice ------------------------------------------------------------------------------


@given(cases(), st.sampled_from((5e-6, 1e-4)))
@settings(max_examples=40)
def test_what_the_greedy_choice_makes_is_right_and_no_slower(
    case: tuple[Problem, Allocation], start_s: float
) -> None:
    one, allocation = case
    cluster = slow_start(CLUSTER, start_s)
    plans = []
    for direction in Direction:
        plan = plan_allocation(one, "by hand", direction, allocation)
        better = improve(plan, cluster, ALL)
        assert better.before_s == pytest.approx(seconds(plan, cluster))
        assert better.after_s <= better.before_s
        if not any(isinstance(task, Collective) for task in better.plan.tasks):
            assert better.after_s == pytest.approx(seconds(better.plan, cluster))
        assert len(better.kept) <= better.tried <= better.found
        plans.append(better.plan)
    assert not wrong(*plans)


@pytest.mark.parametrize("name", ["owner:placement=zigzag", "grid", "ring", "zigzag", "usp:2x4"])
@pytest.mark.parametrize("direction", Direction)
def test_a_timeline_tells_the_simulated_time(name: str, direction: Direction) -> None:
    plan = strategy(name).plan(problem("causal", cp=8, seqlen=1009), direction)
    expected = seconds(plan, CLUSTER)
    if name.startswith("usp"):
        assert Timeline(graph_of(plan, CLUSTER)).makespan == pytest.approx(expected, rel=0.1)
    else:
        assert Timeline(graph_of(plan, CLUSTER)).makespan == pytest.approx(expected, rel=1e-12)


@given(cases(), st.randoms())
def test_a_timeline_stays_right_while_nodes_are_replaced_and_restored(
    case: tuple[Problem, Allocation], random: object
) -> None:
    """After each change all ends are those of a timeline that is made anew."""
    one, allocation = case
    plan = plan_allocation(one, "by hand", Direction.BACKWARD, allocation)
    timed = TimedPlan(plan, CLUSTER)
    line = timed.timeline
    found = [each for finder in ALL for each in finder(timed)]
    random.shuffle(found)
    gone: set[int] = set()
    for each in found[:25]:
        if not gone.isdisjoint(each.members):
            continue
        before = (list(line.end), line.makespan, line.idle)
        change = line.replace(
            each.members, each.seconds, each.streams, late=each.late, lag_s=each.lag_s
        )
        if change is not None:
            assert line.end == pytest.approx(ends_anew(line))
        if change is not None and random.random() < 0.5:
            change.undo()
            change = None
        if change is None:
            assert before == (line.end, line.makespan, line.idle)
        else:
            gone.update(each.members)


def ends_anew(line: Timeline) -> list[float]:
    ends = [0.0] * len(line.end)
    for node in line.order():
        earlier = [ends[first] + line.lags[node] for first in line.after[node]]
        earlier += [ends[first] for first in line.left[node].values()]
        ends[node] = max([line.lags[node], *earlier]) + line.seconds[node]
    return ends


def test_a_result_that_the_caller_finds_slower_is_given_up() -> None:
    plan, cluster = figure()
    kept = improve(plan, cluster, ALL, evaluate=lambda one: -float(len(one.tasks)))
    assert kept.plan == plan
    assert kept.after_s == kept.before_s
    assert kept.kept == ()
    assert improve(plan, cluster, ALL, most_tries=0).plan == plan


def test_gain_is_what_the_members_take_in_turn_less_what_one_takes() -> None:
    plan, cluster = figure()
    timed = TimedPlan(plan, cluster)
    found: list[Replacement] = [each for finder in ALL for each in finder(timed)]
    for each in found:
        if isinstance(each.task, Transfer):
            saved = (len(each.members) - 1) * cluster.nvlink.latency_s
        elif isinstance(each.task, Tile):
            saved = (len(each.members) - 1) * cluster.gpu.kernel_start_s
        else:
            continue
        assert each.gain_s == pytest.approx(saved, rel=1e-3)
        graph = graph_of(rebuilt(plan, plan.tasks), cluster)
        assert sum(graph.seconds[i] for i in each.members) == pytest.approx(
            each.seconds + each.gain_s
        )


def test_zigzag_pairs_on_one_rank_are_worth_a_batch() -> None:
    """Eight ranks, two chunks each: with latency alone to pay, batches are taken."""
    slow = replace(CLUSTER, nvlink=Link(bandwidth_bytes_per_s=1e15, latency_s=1e-3))
    plan = plan_allocation(
        problem("full", cp=3, seqlen=46),
        "by hand",
        Direction.FORWARD,
        Allocation(
            queries=zigzag(46, 3),
            keys=zigzag(46, 3),
            cells=tuple(((0, 1, 2, 2, 1, 0)[i],) * 6 for i in range(6)),
        ),
    )
    better = improve(plan, slow, [batch.batched_transfers])
    moves = [task for task in better.plan.tasks if isinstance(task, Transfer)]
    assert len(moves) == 6
    assert better.after_s < better.before_s

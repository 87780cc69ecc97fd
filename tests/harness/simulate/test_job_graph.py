from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from harness.cluster.presets import cluster
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.residency import Program
from harness.plan.tasks import Transfer
from harness.schedule.post_late import posted_late
from harness.simulate.calibrated import pricer, skeleton_on
from harness.simulate.contention import Job, run_jobs
from harness.simulate.job_graph import skeleton
from harness.simulate.jobs import Need, NeedKind, Skeleton
from harness.simulate.queues import Stream
from harness.simulate.simulator import simulate
from harness.simulate.tile_calls import gpu_calls
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import strategy

CASES = (
    ("grid:rows=8", "full", 8, False),
    ("grid:rows=2", "full", 8, False),
    ("grid:rows=4", "full", 8, True),
    ("ring", "full", 16, False),
    ("zigzag", "causal", 8, False),
    ("owner", "strided", 8, False),
    ("ring", "causal", 9, False),
    ("allgather", "causal", 9, False),
)


def program(text: str, pattern: str, cp: int, direction: Direction, heads: int = 1) -> Program:
    problem = Problem(
        pattern=make_pattern(pattern, cp * 64),
        heads_q=heads,
        heads_kv=heads,
        head_dim=128,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )
    return verify(strategy(text).plan(problem, direction))


def priced(shape: Skeleton, price: Callable[[Need], tuple[tuple[float, ...], float]]) -> list[Job]:
    """Jobs with times: `price` returns seconds per transfers beside, and a wave's."""
    jobs = []
    for part in shape.parts:
        seconds, wave_s = price(part.need)
        jobs.append(
            Job(
                queues=part.queues,
                ranks=part.ranks,
                seconds=seconds,
                after=part.after,
                wave_s=wave_s,
                moves=part.need.kind is NeedKind.TRANSFER,
                gates=part.gates,
            )
        )
    return jobs


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("text", "pattern", "cp", "late"), CASES)
def test_folding_changes_no_time(
    text: str, pattern: str, cp: int, late: bool, direction: Direction
) -> None:
    made = program(text, pattern, cp, direction)
    if late:
        made = verify(posted_late(made.plan, cluster("h100-1x8")))
    whole, folded = skeleton(made, 8, fold=False), skeleton(made, 8)
    assert any(part.gates for part in whole.parts) is late
    assert len(whole.parts) == whole.folded == folded.folded
    for move, wave_s, blocking in product((0.05, 0.37, 1.3), (0.0, 0.3, 1.0), (False, True)):

        def price(
            need: Need, move: float = move, wave_s: float = wave_s
        ) -> tuple[tuple[float, ...], float]:
            if need.kind is NeedKind.TRANSFER:
                far, extra = 1 + need.far, sum(need.size) % 7 * 0.01
                return (far * move + extra, far * move * 1.4 + extra), 0.0
            if need.kind is NeedKind.TILE:
                return (1.0, 1.1, 1.25, 1.3), wave_s
            return (0.1,), 0.0

        ends = [max(run_jobs(priced(s, price), blocking=blocking)[1]) for s in (whole, folded)]
        assert ends[0] == ends[1]


def test_a_rank_that_posts_sooner_than_others_is_no_longer_like_them() -> None:
    late = posted_late(
        program("grid:rows=4", "full", 8, Direction.BACKWARD).plan, cluster("h100-1x8")
    )
    even = skeleton(verify(late), 8)
    gated = next(part for part in skeleton(verify(late), 8, fold=False).parts if part.gates)
    tasks = list(late.tasks)
    after = tuple(n for n in tasks[gated.task].after if n not in gated.gates)
    tasks[gated.task] = replace(tasks[gated.task], after=after)
    uneven = skeleton(verify(replace(late, tasks=tuple(tasks))), 8)
    assert len(uneven.parts) > len(even.parts)


def test_a_plan_that_ranks_run_in_step_folds_to_one_rank() -> None:
    made = skeleton(program("ring", "full", 16, Direction.FORWARD), 16)
    assert len(made.parts) * 16 == made.folded
    assert {rank for part in made.parts for rank in part.ranks} == {0}


def test_a_plan_whose_ranks_all_differ_is_left_as_it_is() -> None:
    made = program("ring", "causal", 9, Direction.FORWARD)
    whole, folded = skeleton(made, 3, fold=False), skeleton(made, 3)
    assert folded == whole
    assert folded.alike == dict.fromkeys(range(9), 1)


def test_nodes_keep_their_ranks_apart() -> None:
    made = skeleton(program("ring", "full", 16, Direction.FORWARD), 8)
    assert len(made.parts) * 2 == made.folded


def test_a_zigzag_pair_at_home_is_one_causal_call() -> None:
    made = program("zigzag", "causal", 4, Direction.FORWARD)
    tile = next(t for t in made.plan.tasks if getattr(t, "area", 0) and t.q == t.kv)
    assert [tuple(c) for c in gpu_calls(made.plan, tile)] == [(64, 64, 1, True, 1.0)]


def test_a_window_is_one_call_with_its_density() -> None:
    made = program("allgather", "window:left=31,right=0", 2, Direction.FORWARD)
    tile = next(t for t in made.plan.tasks if getattr(t, "area", 0))
    (call,) = gpu_calls(made.plan, tile)
    assert not call.causal
    assert 0 < call.density < 1


def test_sizes_count_every_head() -> None:
    one, four = (skeleton(program("ring", "full", 4, Direction.BACKWARD, h), 8) for h in (1, 4))
    for a, b in zip(one.parts, four.parts, strict=True):
        assert tuple(4 * count for count in a.need.size) == tuple(b.need.size)
        assert [(c.rows, 4 * c.heads) for c in a.need.calls] == [
            (c.rows, c.heads) for c in b.need.calls
        ]


def test_what_waits_for_a_receive_waits_for_its_batch_s_send_in_eager_torch_only() -> None:
    made = program("ring-classic", "full", 4, Direction.FORWARD)
    lazy, eager = (skeleton(made, 2, eager=e, fold=False) for e in (False, True))
    more = 0
    for a, b in zip(lazy.parts, eager.parts, strict=True):
        assert set(a.after) <= set(b.after)
        for index in set(b.after) - set(a.after):
            # The rank's own send, launched with a receive that it waited for before.
            sent = eager.parts[index]
            assert sent.ranks[0] == b.ranks[0]
            assert any(lazy.parts[n].ranks[1:] == b.ranks for n in a.after)
            more += 1
    assert more


def test_hosts_count_what_they_launch_and_what_of_it_leaves_the_node() -> None:
    made = program("ring-classic", "full", 4, Direction.FORWARD)
    parts = skeleton(made, 2, eager=True, fold=False).parts
    last = {rank: n for p in parts for rank, n in zip(p.ranks, p.launched, strict=False)}
    # Four tiles and three batches each; every rank sends to or receives from the other node.
    assert {n.calls for n in last.values()} == {4}
    assert {n.moves for n in last.values()} == {3}
    assert {n.far for n in last.values()} == {3}
    alone = skeleton(made, 4, eager=True, fold=False).parts
    assert all(n.far == 0 for p in alone for n in p.launched)
    assert all(not p.launched for p in skeleton(made, 2, fold=False).parts)


def test_a_stripe_takes_slices_where_keys_come_from_later_ranks_and_a_ring_never() -> None:
    stripe = program("stripe:prune=false", "causal", 5, Direction.FORWARD)
    tiles = [p.need for p in skeleton(stripe, 5, eager=True, fold=False).parts if p.need.calls]
    assert [n.sliced for n in tiles].count(True) == 5 * 4 // 2
    assert all(n.sliced is (n.calls[0].rows % 2 == 1) for n in tiles)  # one query fewer
    parts = skeleton(stripe, 5, eager=True, fold=False).parts
    last = {rank: n for p in parts for rank, n in zip(p.ranks, p.launched, strict=False)}
    assert [last[rank].slices for rank in range(5)] == [4, 3, 2, 1, 0]
    # k and v each, to the next rank and from the last, in four batches.
    assert {(n.moves, n.messages) for n in last.values()} == {(4, 8)}
    ring = skeleton(program("ring-classic", "causal", 5, Direction.FORWARD), 5, eager=True).parts
    assert not any(p.need.sliced for p in ring)


@pytest.mark.parametrize(("text", "direction"), list(product(("ring", "grid:rows=2"), Direction)))
def test_a_thread_waits_for_a_send_before_it_frees_what_is_sent(
    text: str, direction: Direction
) -> None:
    made = program(text, "full", 4, direction, heads=3)
    trace = simulate(made, cluster("local-cpu"))
    ends = {span.task: span.end_s for span in trace.spans}
    sends: dict[int, list[int]] = {}
    waited = 0
    for index, (task, step) in enumerate(zip(made.plan.tasks, made.steps, strict=True)):
        if isinstance(task, Transfer):
            for access in step.accesses:
                if access.place == task.leg.src and len(access.segments) == 1:
                    sends.setdefault(access.segments[0].slab, []).append(index)
        for slab in step.frees:
            rank = made.slabs[slab].place.rank
            later = [s for s in trace.spans if s.rank == rank and s.task > index]
            for send in sends.get(slab, ()):
                starts = [s.start_s for s in later if s.stream is Stream.COMPUTE]
                assert all(start >= ends[send] * (1 - 1e-9) for start in starts)
                waited += bool(starts) and send == index
    # A partial result is freed as it is sent, and the rank has more to compute.
    assert bool(waited) is (text != "ring" or direction is Direction.BACKWARD)


@pytest.mark.parametrize("text", ["ring", "owner", "allgather", "ulysses"])
def test_a_thread_in_a_kernel_issues_no_transfer(text: str) -> None:
    made = program(text, "causal", 4, Direction.FORWARD, heads=4)
    free, bound = (skeleton(made, 8, fold=False, threaded=t).parts for t in (False, True))
    busy: dict[int, int] = {}
    held = 0
    for index, (part, before) in enumerate(zip(bound, free, strict=True)):
        if part.need.kind in (NeedKind.TRANSFER, NeedKind.COLLECTIVE):
            kernels = {busy[rank] for rank in part.peers or part.ranks if rank in busy}
            assert set(part.after) >= {*before.after, *kernels}
            held += len(kernels - set(before.after))
        else:
            busy.update(dict.fromkeys(part.ranks, index))
    if text == "ulysses":  # copies of heads are sent, and live until the rank sends again
        *_, there, back = [i for i, p in enumerate(bound) if p.need.kind is NeedKind.COLLECTIVE]
        assert there in bound[back].after
        assert there not in free[back].after
    # An all-gather comes before the first kernel, and heads go home behind the last.
    assert bool(held) is (text == "ring")
    for machine, parts in (("local-cpu", bound), ("a100", free)):
        fitted = cluster(machine).fitted
        assert fitted is not None
        seen = skeleton_on(made, fitted, eager=False, fold=False).parts
        assert [part.after for part in seen] == [part.after for part in parts]


def test_collectives_of_the_same_ranks_move_one_after_another() -> None:
    # Forward, allgather gathers k and v: neither waits for the other, but both cross all ports.
    machine = cluster("h100-hamming")
    assert machine.fitted is not None
    made = program("allgather", "full", 16, Direction.FORWARD)
    prices = pricer(made.plan.problem, Direction.FORWARD, machine.fitted, eager=False)
    for shape in (skeleton(made, 8), skeleton(made, 8, fold=False)):
        starts, ends = prices.times(shape)
        gathers = [
            (start, end)
            for part, start, end in zip(shape.parts, starts, ends, strict=True)
            if part.need.kind is NeedKind.COLLECTIVE
        ]
        (_, first_ends), (second_starts, second_ends) = gathers
        assert second_starts == first_ends < second_ends

"""Device programs: emitted ones are proved and print; each rule of the proof refuses its breach."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.errors import DeviceProgramError
from harness.plan.problem import Dtype, Problem
from harness.plan.residency import Program
from harness.plan.tasks import Memory
from harness.prepare.verified_plans import planned
from harness.program.arena import Arena
from harness.program.check import check_limits, check_program
from harness.program.check_bytes import byte_runs, check_bytes
from harness.program.check_progress import check_progress, matched
from harness.program.emit import emit
from harness.program.operations import (
    COMMUNICATORS,
    MOST_POSTS,
    ByteView,
    DeviceProgram,
    Group,
    Kernel,
    KernelLaunch,
    Lane,
    Operation,
    Post,
    PostEnd,
    RankProgram,
    Record,
    Wait,
)
from harness.program.program_json import program_from_json, program_json
from harness.program.sides import two_sides
from tests.support import layer_problem, problem

EVEN, ODD = Lane.NVLINK_EVEN, Lane.NVLINK_ODD


def small(cp: int = 3, pattern: str = "causal") -> Problem:
    return problem(
        pattern, 5 * cp + 2, heads=(8, 4), dims=(6, 4), dtype=Dtype.BFLOAT16, batch=2, cp=cp
    )


def forward(text: str, of: Problem | None = None) -> Program:
    return planned(of or small(), text).forward


@pytest.mark.parametrize("text", ["zigzag", "ulysses", "allgather", "owner", "mesh", "tasp"])
@pytest.mark.parametrize("cp", [1, 4])
def test_programs_of_both_directions_are_proved(text: str, cp: int) -> None:
    both = planned(small(cp, "window:left=5"), text)
    for resolved in (both.forward, both.backward):
        check_program(resolved.plan, emit(resolved, gpus_per_node=3))


@pytest.mark.parametrize(
    "text", ["upipe", "fpdt", "zigzag:offload=true", "ring:checkpoint=layer,sum_gradients=true"]
)
def test_programs_of_layers_are_proved_and_copy_beside_computing(text: str) -> None:
    both = planned(layer_problem(heads=(8, 4), dtype=Dtype.BFLOAT16, cp=2), text)
    programs = [emit(resolved) for resolved in (both.forward, both.backward)]
    for resolved, program in zip((both.forward, both.backward), programs, strict=True):
        check_program(resolved.plan, program)
    lanes = {op.lane for each in programs for rank in each.ranks for op in rank.operations}
    moves = text.startswith("fpdt") or "offload" in text
    assert ({Lane.TO_HOST, Lane.TO_DEVICE} <= lanes) is moves


def test_a_program_prints_hashes_and_comes_back_from_json() -> None:
    program = emit(forward("zigzag"))
    again = program_from_json(program_json(program))
    assert (again, again.hash, hash(again)) == (program, program.hash, hash(program))
    other = replace(program, gpus_per_node=2)
    assert other.hash != program.hash
    text = str(program)
    for word in ("rank 2", "attend of task", "send device[", "receive device[", "wait 0"):
        assert word in text


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ('"attend"', '"attended"', "kernel"),
        ('"nvlink-even"', '"nvlink"', "lane"),
        ('"send"', '"sends"', "end"),
        ('"launch"', '"lunch"', "kind"),
        ('"schema":1', '"schema":2', "schema"),
    ],
)
def test_json_that_is_no_program_is_refused_by_its_field(old: str, new: str, names: str) -> None:
    text = program_json(emit(forward("zigzag")))
    assert old in text
    with pytest.raises(ValueError, match=names):
        program_from_json(text.replace(old, new, 1))


def test_a_ring_step_is_one_group_to_send_and_one_to_receive_side_by_side() -> None:
    for rank in emit(forward("ring-classic", small(4)), gpus_per_node=4).ranks:
        groups = [op for op in rank.operations if isinstance(op, Group)]
        ways = {(op.lane, tuple(post.end for post in op.posts)) for op in groups}
        assert len(groups) == 2 * 3  # steps
        sends, receives = [PostEnd.SEND] * 2, [PostEnd.RECEIVE] * 2  # k and v
        mine, other = (EVEN, ODD) if rank.rank % 2 == 0 else (ODD, EVEN)
        assert ways == {(mine, tuple(sends)), (other, tuple(receives))}


def test_links_inside_a_node_and_between_nodes_have_communicators_of_their_own() -> None:
    lanes = {
        text: {
            op.lane
            for rank in emit(forward(text, small(6)), gpus_per_node=3).ranks
            for op in rank.operations
            if isinstance(op, Group)
        }
        for text in ("ring-classic", "ulysses")
    }
    assert all(found == COMMUNICATORS for found in lanes.values())


def test_neighbours_in_even_rings_are_on_two_sides_and_the_heaviest_pairs_come_first() -> None:
    ring = {(min(a, b), max(a, b)): 5 for a, b in ((r, (r + 3) % 8) for r in range(8))}
    side = two_sides(8, ring)
    assert all(side[one] != side[other] for one, other in ring)
    triangle = two_sides(3, {(0, 1): 1, (1, 2): 7, (0, 2): 5})
    assert triangle[1] != triangle[2] != triangle[0]
    assert two_sides(2, {}) == [0, 0]


def test_a_slow_step_holds_two_buffers_and_not_all() -> None:
    few, many = (
        emit(forward("ring-classic", small(cp))).ranks[0].arena_bytes[Memory.DEVICE]
        for cp in (4, 8)
    )
    assert many == few  # inputs are as large, and keys in passing take turns


# Rules, on programs written by hand ----------------------------------------------------------


def view(offset: int, tokens: int = 4, memory: Memory = Memory.DEVICE) -> ByteView:
    return ByteView(
        memory, offset, (1, 1, tokens, 2), (2 * tokens, 2 * tokens, 2, 1), Dtype.FLOAT32
    )


def rank_program(rank: int, *operations: Operation) -> RankProgram:
    sizes = {Memory.DEVICE: 4096, Memory.HOST: 4096}
    return RankProgram(rank, operations, sizes, (), (), ())


def copy(lane: Lane, source: int, target: int) -> KernelLaunch:
    return KernelLaunch(lane, Kernel.COPY, (view(source),), (view(target),), 0)


def group(lane: Lane, *posts: tuple[PostEnd, int, int]) -> Group:
    return Group(lane, tuple(Post(way, peer, view(offset)) for way, peer, offset in posts))


RECEIVED = group(EVEN, (PostEnd.RECEIVE, 1, 0))
READ = copy(Lane.COMPUTE, 0, 512)
ORDERED = (Record(EVEN, 0), Wait(Lane.COMPUTE, 0))


def test_what_arrives_is_read_after_its_wait_only() -> None:
    check_bytes(rank_program(0, RECEIVED, *ORDERED, READ))
    with pytest.raises(DeviceProgramError, match="is ordered"):
        check_bytes(rank_program(0, RECEIVED, READ))


def test_a_record_after_another_operation_orders_all_before_it() -> None:
    later = group(EVEN, (PostEnd.RECEIVE, 1, 1024))
    check_bytes(rank_program(0, RECEIVED, later, *ORDERED, READ))
    with pytest.raises(DeviceProgramError, match="is ordered"):
        check_bytes(rank_program(0, later, *ORDERED[:1], RECEIVED, *ORDERED[1:], READ))


def test_order_passes_through_a_third_lane() -> None:
    relay = (Record(EVEN, 0), Wait(ODD, 0), Record(ODD, 1), Wait(Lane.COMPUTE, 1))
    check_bytes(rank_program(0, RECEIVED, *relay, READ))


def test_bytes_that_are_sent_are_written_after_the_send_only() -> None:
    sent, written = group(EVEN, (PostEnd.SEND, 1, 0)), copy(Lane.COMPUTE, 512, 0)
    check_bytes(rank_program(0, sent, *ORDERED, written))
    with pytest.raises(DeviceProgramError, match="is ordered"):
        check_bytes(rank_program(0, sent, written))


def test_rows_side_by_side_in_other_heads_do_not_overlap() -> None:
    # Two heads of 4 tokens: rows 0-1 of both, and rows 2-3 of both, are interleaved.
    top = ByteView(Memory.DEVICE, 0, (1, 2, 2, 2), (16, 8, 2, 1), Dtype.FLOAT32)
    assert list(byte_runs(top)) == [(0, 16), (32, 48)]
    rest = top._replace(offset=16)
    one, other = (
        KernelLaunch(lane, Kernel.ZERO, (), (target,), 0)
        for lane, target in ((Lane.COMPUTE, top), (Lane.TO_DEVICE, rest))
    )
    check_bytes(rank_program(0, one, other))
    with pytest.raises(DeviceProgramError, match="is ordered"):
        check_bytes(rank_program(0, one, other._replace(writes=(top,))))


def test_an_event_is_recorded_before_it_is_waited_for_and_once() -> None:
    with pytest.raises(DeviceProgramError, match="not recorded yet"):
        check_bytes(rank_program(0, Wait(EVEN, 0), Record(Lane.COMPUTE, 0)))
    with pytest.raises(DeviceProgramError, match="recorded again"):
        check_bytes(rank_program(0, Record(EVEN, 0), Record(EVEN, 0)))


def test_a_group_does_not_receive_what_it_sends() -> None:
    with pytest.raises(DeviceProgramError, match="writes each byte once"):
        check_bytes(rank_program(0, group(EVEN, (PostEnd.SEND, 1, 0), (PostEnd.RECEIVE, 1, 16))))


def test_a_view_beyond_its_arena_is_refused() -> None:
    check_bytes(rank_program(0, copy(Lane.COMPUTE, 0, 4096 - 32)))
    with pytest.raises(DeviceProgramError, match="lie in their arena"):
        check_bytes(rank_program(0, copy(Lane.COMPUTE, 0, 4096 - 28)))


def progress(*ranks: RankProgram) -> None:
    check_progress(ranks, matched(ranks))


def test_groups_in_other_orders_on_two_ranks_wait_for_themselves() -> None:
    first, second = (PostEnd.SEND, 1, 0), (PostEnd.RECEIVE, 1, 512)
    there = rank_program(
        1, group(EVEN, (PostEnd.RECEIVE, 0, 0)), group(EVEN, (PostEnd.SEND, 0, 512))
    )
    progress(rank_program(0, group(EVEN, first), group(EVEN, second)), there)
    progress(rank_program(0, group(EVEN, second, first)), there)
    with pytest.raises(DeviceProgramError, match="waits for itself"):
        progress(rank_program(0, group(EVEN, second), group(EVEN, first)), there)


def test_groups_on_communicators_of_their_own_may_be_in_any_order() -> None:
    here = rank_program(0, group(ODD, (PostEnd.RECEIVE, 1, 512)), group(EVEN, (PostEnd.SEND, 1, 0)))
    there = rank_program(
        1, group(EVEN, (PostEnd.RECEIVE, 0, 0)), group(ODD, (PostEnd.SEND, 0, 512))
    )
    progress(here, there)


def test_a_wait_for_what_comes_after_its_own_message_never_ends() -> None:
    here = rank_program(
        0,
        group(EVEN, (PostEnd.SEND, 1, 0)),
        Record(EVEN, 0),
        Wait(ODD, 0),
        group(ODD, (PostEnd.SEND, 1, 512)),
    )
    there = rank_program(
        1,
        group(ODD, (PostEnd.RECEIVE, 0, 512)),
        Record(ODD, 0),
        Wait(EVEN, 0),
        group(EVEN, (PostEnd.RECEIVE, 0, 0)),
    )
    with pytest.raises(DeviceProgramError, match="waits for itself"):
        progress(here, there)


def test_a_message_has_two_ends_of_one_size() -> None:
    sent = rank_program(0, group(EVEN, (PostEnd.SEND, 1, 0)))
    with pytest.raises(DeviceProgramError, match="two ends"):
        matched((sent, rank_program(1)))
    with pytest.raises(DeviceProgramError, match="two ends"):
        matched((sent, rank_program(1, group(ODD, (PostEnd.RECEIVE, 0, 0)))))
    short = Group(EVEN, (Post(PostEnd.RECEIVE, 0, view(0, tokens=3)),))
    with pytest.raises(DeviceProgramError, match="one size"):
        matched((sent, rank_program(1, short)))


@pytest.mark.parametrize(
    ("operation", "why"),
    [
        (group(EVEN, *[(PostEnd.SEND, 1, 0)] * (MOST_POSTS + 1)), "257 posts"),
        (group(EVEN), "0 posts"),
        (group(Lane.NIC_EVEN, (PostEnd.SEND, 1, 0)), "not reached"),
        (group(EVEN, (PostEnd.SEND, 2, 0)), "not reached"),
        (group(EVEN, (PostEnd.SEND, 0, 0)), "not reached"),
        (group(Lane.COMPUTE, (PostEnd.SEND, 1, 0)), "no communicator"),
        (copy(EVEN, 0, 512), "no work"),
        (copy(Lane.TO_HOST, 0, 512), "that way"),
        (
            KernelLaunch(Lane.COMPUTE, Kernel.COPY, (view(0, memory=Memory.HOST),), (view(0),), 0),
            "memory",
        ),
    ],
)
def test_an_operation_beyond_the_limits_of_its_lane_is_refused(
    operation: Operation, why: str
) -> None:
    check_limits(rank_program(0, group(EVEN, *[(PostEnd.SEND, 1, 0)] * MOST_POSTS)), 2)
    with pytest.raises(DeviceProgramError, match=why):
        check_limits(rank_program(0, operation), 2)


# The plan's work -----------------------------------------------------------------------------


def broken(
    resolved: Program, change: Callable[[list[Operation]], None], rank: int = 1
) -> DeviceProgram:
    program = emit(resolved)
    operations = list(program.ranks[rank].operations)
    change(operations)
    ranks = list(program.ranks)
    ranks[rank] = replace(ranks[rank], operations=tuple(operations), ranges=())
    return replace(program, ranks=tuple(ranks))


def launches(operations: list[Operation], kernel: Kernel) -> list[int]:
    return [
        at
        for at, op in enumerate(operations)
        if isinstance(op, KernelLaunch) and op.kernel is kernel
    ]


def test_merges_in_another_order_are_refused() -> None:
    def swap(operations: list[Operation]) -> None:
        first, second = launches(operations, Kernel.MERGE)[-2:]
        operations.insert(second, operations.pop(first))

    resolved = forward("ring-q", small(4, "full"))
    check_program(resolved.plan, broken(resolved, lambda _: None))
    with pytest.raises(DeviceProgramError, match="computes them"):
        check_program(resolved.plan, broken(resolved, swap))


def test_a_kernel_call_that_is_left_out_or_done_twice_is_refused() -> None:
    resolved = forward("zigzag")

    def leave_out(operations: list[Operation]) -> None:
        del operations[launches(operations, Kernel.ATTEND)[0]]

    def repeat(operations: list[Operation]) -> None:
        at = launches(operations, Kernel.ATTEND)[0]
        operations.insert(at, operations[at])

    for change, times in ((leave_out, 0), (repeat, 2)):
        with pytest.raises(DeviceProgramError, match=f"launched {times} times"):
            check_program(resolved.plan, broken(resolved, change))


def test_a_kernel_that_reads_other_rows_is_refused() -> None:
    resolved = forward("zigzag")

    def other_rows(operations: list[Operation]) -> None:
        at = launches(operations, Kernel.ATTEND)[0]
        launch = operations[at]
        assert isinstance(launch, KernelLaunch)
        q, k, v = launch.reads
        aside = q._replace(offset=k.offset if q.offset != k.offset else v.offset)
        operations[at] = launch._replace(reads=(aside, k, v))

    with pytest.raises(DeviceProgramError, match=r"computes them|was written"):
        check_program(resolved.plan, broken(resolved, other_rows))


def test_a_program_of_another_plan_is_refused() -> None:
    program = emit(forward("zigzag"))
    with pytest.raises(DeviceProgramError, match="is of its plan"):
        check_program(forward("ring").plan, program)
    with pytest.raises(DeviceProgramError, match="all ranks"):
        check_program(forward("zigzag").plan, replace(program, ranks=program.ranks[:2]))


# Memory and waiting --------------------------------------------------------------------------


def test_freed_bytes_that_cost_no_wait_are_used_first_then_those_freed_long_ago() -> None:
    arena = Arena()
    early, _ = arena.take(200, {}, 9)
    late, _ = arena.take(256, {}, 9)
    assert (early, late, arena.size) == (0, 256, 512)
    arena.give(early, 200, {EVEN: 3}, 1)
    arena.give(late, 256, {EVEN: 5}, 4)
    assert arena.take(100, {EVEN: 5}, 0) == (early, {EVEN: 3})  # both are known: the older one
    arena.give(early, 100, {EVEN: 6}, 5)
    assert arena.take(100, {EVEN: 5}, 0) == (late, {EVEN: 5})  # one is known
    assert arena.take(100, {EVEN: 5}, 4) == (512, {})  # the other was freed after step 4
    assert arena.take(100, {EVEN: 5}, 5) == (early, {EVEN: 6})


def test_neighbouring_holes_make_room_together() -> None:
    arena = Arena()
    for _ in range(4):
        arena.take(256, {}, 9)
    arena.give(512, 256, {EVEN: 4}, 2)
    assert arena.take(512, {}, 9) == (1024, {})
    arena.give(256, 256, {ODD: 7}, 2)
    assert arena.take(300, {}, 9) == (256, {ODD: 7, EVEN: 4})


def test_computing_does_not_wait_for_what_it_just_sent() -> None:
    resolved = forward("double_ring:inner=2", small(4))
    for rank in emit(resolved, gpus_per_node=2).ranks:
        events, waiting = {}, set()
        last: tuple[PostEnd, ...] = ()
        for operation in rank.operations:
            match operation:
                case Group(posts=posts):
                    last = tuple(post.end for post in posts)
                case Record(event=event):
                    events[event] = last if operation.lane in COMMUNICATORS else ()
                case Wait(lane=Lane.COMPUTE, event=event):
                    waiting.add(events[event])
                case _:
                    pass
        assert all(PostEnd.RECEIVE in ends for ends in waiting)


def test_who_may_run_further_ahead_waits_less_and_holds_more() -> None:
    resolved = forward("double_ring:inner=4", small(8))
    near, far = (emit(resolved, gpus_per_node=4, ahead=ahead) for ahead in (1, 3))
    check_program(resolved.plan, far)
    waits, sizes = (
        [sum(measure(rank) for rank in program.ranks) for program in (near, far)]
        for measure in (
            lambda rank: sum(isinstance(op, Wait) for op in rank.operations),
            lambda rank: rank.arena_bytes[Memory.DEVICE],
        )
    )
    assert waits[0] > waits[1]
    assert sizes[0] < sizes[1]

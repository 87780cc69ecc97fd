"""Run a device program on bytes of this machine, under whatever timing a policy chooses.

Any lane of any rank whose next operation can start or end may go next. What a device may do with
bytes under way is done: the targets of a kernel and of a message are poison from its start until
its end, a message carries the bytes that are there when its sender ends (or its receiver, if that
is sooner), a range is poison once its last user is over, and so is every arena at the start. So a
program that is right gives the same bits under every policy, and one that is wrong gives other
bits, or comes to a stop, under some.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from harness.plan.plan import Plan
from harness.plan.tasks import Resident
from harness.play.bound import Arenas, DoLaunch, bind_launch, tensor_at
from harness.play.policies import Policy, Turn
from harness.program.operations import (
    MOST_POSTS,
    ByteRange,
    ByteView,
    DeviceProgram,
    Group,
    KernelLaunch,
    Lane,
    Operation,
    Post,
    PostEnd,
    RankProgram,
    Record,
    Wait,
)

_POISON = 0xFF
"""Byte of which every floating-point number is a NaN."""

_End = tuple[int, int, int]
"""Rank, operation, post."""


@dataclass(slots=True)
class Ended:
    """How a run came to its end.

    Attributes:
        results: Outputs and saved pieces; empty if it came to a stop.
        stuck: Lanes that could not go on.
        changed: Messages whose bytes changed while they were under way, inputs that did, and
            kernels that would write what they read.
    """

    results: dict[Resident, torch.Tensor] = field(default_factory=dict)
    stuck: tuple[Turn, ...] = ()
    changed: int = 0


def run_under(
    plan: Plan,
    program: DeviceProgram,
    inputs: Mapping[Resident, torch.Tensor],
    policy: Policy,
) -> Ended:
    """Run a program once.

    Args:
        plan: Its plan.
        program: The program, proved or not.
        inputs: A tensor for each initial resident of the plan.
        policy: The timing.
    """
    with torch.no_grad():
        return _Run(plan, program, inputs).run(policy)


class _Rank:
    """One rank: its memory, its bound launches, and how far each lane is."""

    def __init__(
        self, plan: Plan, program: RankProgram, inputs: Mapping[Resident, torch.Tensor]
    ) -> None:
        self.program = program
        self.arenas: Arenas = {
            memory: torch.full((size,), _POISON, dtype=torch.uint8)
            for memory, size in program.arena_bytes.items()
        }
        self.launches: dict[int, DoLaunch] = {}
        self.queues: dict[Lane, list[int]] = {}
        self.recorded: set[int] = set()
        self.called: dict[int, bool] = {}  # wait -> whether its event was recorded before
        events: set[int] = set()
        for number, operation in enumerate(program.operations):
            self.queues.setdefault(operation.lane, []).append(number)
            match operation:
                case KernelLaunch():
                    self.launches[number] = bind_launch(plan, operation, self.arenas)
                case Record(event=event):
                    events.add(event)
                case Wait(event=event):
                    self.called[number] = event in events
                case Group():
                    pass
        for queue in self.queues.values():
            queue.reverse()
        for at, view in program.inputs:
            tensor_at(self.arenas, view).copy_(inputs[plan.initial[at]])
        self._lives(program)

    def _lives(self, program: RankProgram) -> None:
        """Count the users of each range, so that it can be poisoned after the last."""
        self.owners: dict[int, set[int]] = {}
        self.left: dict[int, int] = defaultdict(int)
        self.begun: set[int] = set()
        kept = [view for _, view in (*program.inputs, *program.outputs)]
        mortal = [
            (index, each)
            for index, each in enumerate(program.ranges)
            if not any(_inside(view, each) for view in kept)
        ]
        for number, operation in enumerate(program.operations):
            views = _views(operation)
            self.owners[number] = {
                index
                for index, each in mortal
                if each.born <= number <= each.dies and any(_inside(v, each) for v in views)
            }
            for index in self.owners[number]:
                self.left[index] += 1

    def begin(self, number: int) -> None:
        self.begun |= self.owners[number]

    def over(self, number: int) -> None:
        """Poison what nobody uses from here on, but for what others use already."""
        for index in self.owners[number]:
            self.left[index] -= 1
            if self.left[index]:
                continue
            self.begun.discard(index)
            dead = self.program.ranges[index]
            alive = torch.ones(dead.size_bytes, dtype=torch.bool)
            for other in (self.program.ranges[each] for each in self.begun):
                if other.memory is dead.memory:
                    low = max(0, other.offset - dead.offset)
                    alive[low : max(0, other.offset + other.size_bytes - dead.offset)] = False
            part = self.arenas[dead.memory][dead.offset : dead.offset + dead.size_bytes]
            part[alive[: part.numel()]] = _POISON

    def data(self, view: ByteView) -> torch.Tensor:
        """The bytes of a dense view."""
        return self.arenas[view.memory][view.offset : view.offset + view.size_bytes]


class _Run:
    def __init__(
        self, plan: Plan, program: DeviceProgram, inputs: Mapping[Resident, torch.Tensor]
    ) -> None:
        self.plan = plan
        self.inputs = inputs
        self.ranks = [_Rank(plan, each, inputs) for each in program.ranks]
        self.mates = _mates(program.ranks)
        self.started: set[tuple[int, int]] = set()
        self.mail: dict[_End, torch.Tensor] = {}
        self.read: dict[_End, torch.Tensor] = {}
        self.changed = 0

    def run(self, policy: Policy) -> Ended:
        while turns := self._turns():
            self._step(policy(turns))
        stuck = tuple(
            Turn(at, lane, ends=False)
            for at, rank in enumerate(self.ranks)
            for lane, queue in rank.queues.items()
            if queue
        )
        return Ended({} if stuck else self._results(), stuck, self.changed + self._spoiled())

    def _spoiled(self) -> int:
        return sum(
            not torch.equal(tensor_at(rank.arenas, view), self.inputs[self.plan.initial[at]])
            for rank in self.ranks
            for at, view in rank.program.inputs
        )

    def _results(self) -> dict[Resident, torch.Tensor]:
        residents = (*self.plan.outputs, *self.plan.saved)
        return {
            residents[at]: tensor_at(rank.arenas, view)
            for rank in self.ranks
            for at, view in rank.program.outputs
        }

    def _turns(self) -> list[Turn]:
        return [
            Turn(at, lane, ends=(at, queue[-1]) in self.started)
            for at, rank in enumerate(self.ranks)
            for lane, queue in rank.queues.items()
            if queue and self._can_go(at, rank, queue[-1])
        ]

    def _can_go(self, at: int, rank: _Rank, number: int) -> bool:
        match rank.program.operations[number]:
            case Wait(event=event):
                return not rank.called[number] or event in rank.recorded
            case Group(posts=posts) if (at, number) in self.started:
                return len(posts) <= MOST_POSTS and all(
                    (mate := self.mates.get((at, number, post))) is not None
                    and mate[:2] in self.started
                    for post in range(len(posts))
                )
            case _:
                return True

    def _step(self, turn: Turn) -> None:
        rank = self.ranks[turn.rank]
        queue = rank.queues[turn.lane]
        number = queue[-1]
        operation = rank.program.operations[number]
        if isinstance(operation, Record | Wait):
            if isinstance(operation, Record):
                rank.recorded.add(operation.event)
            queue.pop()
            return
        if not turn.ends:
            self.started.add((turn.rank, number))
            rank.begin(number)
            self._start(rank, operation)
            return
        if isinstance(operation, KernelLaunch):
            try:
                rank.launches[number]()
            except RuntimeError:  # torch refuses to copy bytes onto others of their own
                self.changed += 1
        else:
            self._end_group(turn.rank, number, operation)
        queue.pop()
        rank.over(number)

    def _start(self, rank: _Rank, operation: KernelLaunch | Group) -> None:
        if isinstance(operation, Group):
            for post in operation.posts:
                if post.end is PostEnd.RECEIVE:
                    rank.data(post.view).fill_(_POISON)
            return
        for view in operation.writes:
            if view not in operation.reads:
                tensor_at(rank.arenas, view).fill_(torch.nan)

    def _end_group(self, at: int, number: int, group: Group) -> None:
        for index, post in enumerate(group.posts):
            here = (at, number, index)
            there = self.mates[here]
            if post.end is PostEnd.SEND:
                self._sent(here, there, self.ranks[at].data(post.view))
            else:
                self._received(here, there, self.ranks[at].data(post.view))

    def _sent(self, here: _End, there: _End, data: torch.Tensor) -> None:
        """Leave what is there now; the receiver may have read it before."""
        before = self.read.pop(here, None)
        if before is None:
            self.mail[there] = data.clone()
        elif not torch.equal(before, data):
            self.changed += 1

    def _received(self, here: _End, there: _End, target: torch.Tensor) -> None:
        data = self.mail.pop(here, None)
        if data is None:
            data = self.ranks[there[0]].data(self._post(there).view)
            self.read[there] = data.clone()
        if data.numel() != target.numel():
            self.changed += 1
            return
        target.copy_(data)

    def _post(self, end: _End) -> Post:
        group = self.ranks[end[0]].program.operations[end[1]]
        assert isinstance(group, Group)
        return group.posts[end[2]]


def _mates(ranks: Sequence[RankProgram]) -> dict[_End, _End]:
    """Match the ends of messages as far as they have two."""
    ends: dict[tuple[int, int, Lane, PostEnd], list[_End]] = defaultdict(list)
    for at, program in enumerate(ranks):
        for number, operation in enumerate(program.operations):
            if not isinstance(operation, Group):
                continue
            for index, post in enumerate(operation.posts):
                src, dst = (at, post.peer) if post.end is PostEnd.SEND else (post.peer, at)
                ends[src, dst, operation.lane, post.end].append((at, number, index))
    found: dict[_End, _End] = {}
    for (src, dst, lane, way), mine in ends.items():
        other = PostEnd.RECEIVE if way is PostEnd.SEND else PostEnd.SEND
        found.update(zip(mine, ends.get((src, dst, lane, other), ()), strict=False))
    return found


def _views(operation: Operation) -> tuple[ByteView, ...]:
    match operation:
        case KernelLaunch():
            return (*operation.reads, *operation.writes)
        case Group():
            return tuple(post.view for post in operation.posts)
        case _:
            return ()


def _inside(view: ByteView, each: ByteRange) -> bool:
    return view.memory is each.memory and each.offset <= view.offset < each.offset + each.size_bytes

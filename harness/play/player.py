"""Play a device program on a device: bound once, then told to its lanes again and again.

`bind_rank` is for one process per rank, whose groups go through `torch.distributed` (see `links`);
`bind_all` puts all ranks of a plan on one device in one process (virtual ranks), where a message is
two waits and a copy: with one GPU, streams, events and memory are real. Every address is fixed, and
nothing waits on the host of a GPU, so that a CUDA graph can capture a run. Never run on a GPU yet.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch

from harness.execute.rotary import TurnsOf
from harness.plan.plan import Plan
from harness.plan.tasks import Resident
from harness.play.bound import bind_launch, tensor_at
from harness.play.streams import Mark, Request, Streams, arenas_on, streams_on
from harness.program.check_progress import Moment, PostAt, check_progress, matched
from harness.program.operations import (
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

HostStep = Callable[[], object]
"""What the host does for an operation."""

BindGroup = Callable[
    [Lane, Sequence[tuple[PostEnd, int, torch.Tensor]]], Callable[[], Sequence[Request]]
]
"""(communicator, posts: what end, which peer, its bytes) -> what starts them as one group."""


@dataclass(frozen=True, slots=True)
class BoundProgram:
    """A program with its memory, ready to run.

    Attributes:
        inputs: Tensors to fill before a run.
        outputs: Tensors that hold the results after it, until the next.
        steps: What the host does, in order.
        streams: Lanes of all ranks in this process.
    """

    inputs: Mapping[Resident, torch.Tensor]
    outputs: Mapping[Resident, torch.Tensor]
    steps: tuple[HostStep, ...]
    streams: tuple[Streams, ...]

    def fill(self, tensors: Mapping[Resident, torch.Tensor]) -> None:
        """Copy inputs to their places."""
        for resident, place in self.inputs.items():
            place.copy_(tensors[resident])

    def run(self) -> None:
        """Tell everything to the lanes; the caller's stream goes on after them."""
        with torch.no_grad():
            for streams in self.streams:
                streams.fork()
            for step in self.steps:
                step()
            for streams in self.streams:
                streams.join()


def bind_rank(
    plan: Plan,
    program: RankProgram,
    device: torch.device,
    bind_group: BindGroup,
    turns_of: TurnsOf | None = None,
) -> BoundProgram:
    """Bind one rank's program.

    Args:
        plan: The plan.
        program: This rank's program, proved.
        device: Where it runs.
        bind_group: How its messages go; see `links.linked_ranks`.
        turns_of: As in `execute`.
    """
    binder = _Binder(plan, program, device, turns_of)
    steps = []
    for lane, some in groupby(program.operations, key=lambda each: each.lane):
        own = tuple(binder.step(operation, bind_group) for operation in some)
        steps.append(partial(_all_on, partial(binder.streams.on, lane), own))
    inputs, outputs = binder.ends()
    return BoundProgram(inputs, outputs, tuple(steps), (binder.streams,))


class _Binder:
    """One rank: its memory, its lanes, and what the host does for each operation."""

    def __init__(
        self, plan: Plan, program: RankProgram, device: torch.device, turns_of: TurnsOf | None
    ) -> None:
        self.plan = plan
        self.program = program
        self.arenas = arenas_on(device, program.arena_bytes)
        lanes = dict.fromkeys(operation.lane for operation in program.operations)
        self.streams = streams_on(device, lanes)
        self._marks: dict[int, Mark] = {}
        self._turns_of = turns_of

    def step(self, operation: Operation, bind_group: BindGroup | None) -> HostStep:
        streams = self.streams
        match operation:
            case KernelLaunch():
                return bind_launch(self.plan, operation, self.arenas, self._turns_of)
            case Group(lane=lane, posts=posts):
                assert bind_group is not None  # groups of virtual ranks are copies
                ends = [(post.end, post.peer, self.data(post)) for post in posts]
                return partial(streams.issue, lane, bind_group(lane, ends))
            case Record(lane=lane, event=event):
                self._marks[event] = streams.mark()
                return partial(streams.record, self._marks[event], lane)
            case Wait(lane=lane, event=event):
                return partial(streams.hold, self._marks[event], lane)

    def data(self, post: Post) -> torch.Tensor:
        """The bytes of a message."""
        view = post.view
        return self.arenas[view.memory][view.offset : view.offset + view.size_bytes]

    def post(self, end: PostAt) -> tuple[Lane, Post]:
        group = self.program.operations[end.operation]
        assert isinstance(group, Group)
        return group.lane, group.posts[end.post]

    def ends(self) -> tuple[dict[Resident, torch.Tensor], dict[Resident, torch.Tensor]]:
        plan, results = self.plan, (*self.plan.outputs, *self.plan.saved)
        return (
            {plan.initial[at]: tensor_at(self.arenas, view) for at, view in self.program.inputs},
            {results[at]: tensor_at(self.arenas, view) for at, view in self.program.outputs},
        )


def _all_on(on: Callable[[], AbstractContextManager[object]], steps: Sequence[HostStep]) -> None:
    with on():
        for step in steps:
            step()


# Virtual ranks -------------------------------------------------------------------------------


def bind_all(
    plan: Plan, program: DeviceProgram, device: torch.device, turns_of: TurnsOf | None = None
) -> BoundProgram:
    """Bind the programs of all ranks on one device, each with lanes and arenas of its own.

    Steps are in an order in which each moment comes after those that it waits for, so that what is
    waited for was told before.

    Raises:
        DeviceProgramError: There is no such order.
    """
    messages = matched(program.ranks)
    order = check_progress(program.ranks, messages)
    ranks = [_Binder(plan, each, device, turns_of) for each in program.ranks]
    started: dict[PostAt, Mark] = {}
    copied: dict[PostAt, Mark] = {}
    steps: list[HostStep] = []
    for at, number, moment in order:
        operation, streams = program.ranks[at].operations[number], ranks[at].streams
        if not isinstance(operation, Group):
            if moment is Moment.ENDED:
                own = (ranks[at].step(operation, None),)
                steps.append(partial(_all_on, partial(streams.on, operation.lane), own))
            continue
        here = [PostAt(at, number, index) for index in range(len(operation.posts))]
        if moment is Moment.STARTED:
            mark = streams.mark()
            steps.append(partial(streams.record, mark, operation.lane))
            started.update(dict.fromkeys(here, mark))
            ready = ((end, messages.mates[end]) for end in here)
            steps.extend(
                _carry(ranks, end, mate, started, copied) for end, mate in ready if mate in started
            )
        elif moment is Moment.ENDED:
            sent = (copied[end] for end in here if end in copied)
            steps.extend(partial(streams.hold, mark, operation.lane) for mark in sent)
    ends = [rank.ends() for rank in ranks]
    return BoundProgram(
        {resident: tensor for given, _ in ends for resident, tensor in given.items()},
        {resident: tensor for _, made in ends for resident, tensor in made.items()},
        tuple(steps),
        tuple(rank.streams for rank in ranks),
    )


def _carry(
    ranks: Sequence[_Binder],
    one: PostAt,
    other: PostAt,
    started: Mapping[PostAt, Mark],
    copied: dict[PostAt, Mark],
) -> HostStep:
    """Copy a message of which both groups have started, on the receiver's lane."""
    sends = ranks[one.rank].post(one)[1].end is PostEnd.SEND
    source, target = (one, other) if sends else (other, one)
    _, sent = ranks[source.rank].post(source)
    lane, received = ranks[target.rank].post(target)
    receiver = ranks[target.rank]
    done = copied[source] = receiver.streams.mark()
    work = (
        partial(receiver.streams.hold, started[source], lane),
        partial(receiver.data(received).copy_, ranks[source.rank].data(sent)),
        partial(receiver.streams.record, done, lane),
    )
    return partial(_all_on, partial(receiver.streams.on, lane), work)

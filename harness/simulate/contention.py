"""Run times of jobs that disturb each other: kernels that slow down, transfers that must wait.

Every rank has queues, first in first out: one for kernels, and an outgoing and an incoming one per
link class. A kernel starts when it heads its queue and what it needs is there. A transfer is posted
at each end apart, when it heads that end's queue and what that end waits for is there (at the
source, the data), and runs from the later posting. From its posting until its end it holds some of
that rank's streaming multiprocessors (SMs), so a kernel beside it has fewer; and, with `blocking`,
one that comes while a kernel's thread blocks fill the GPU is posted only when a wave of them ends.

    kernels   [ tile 0: one wave ][ tile 1, fewer SMs ][ tile 2 ]
    incoming         ............[ leg, posted only when tile 0 ends ]

Without both effects start times are longest paths, as in `simulator.start_times`. Ranks that are
processes may share fewer `cores`: when more kernels and messages are under way than there are
cores, all of them slow down alike, as a fair scheduler deals time. No randomness, no clock: equal
input gives equal output. Left out: priorities of streams, and NCCL kernels that get
their SMs one by one.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from harness.errors import CycleError

HELD = 4
"""Kernels are timed with 0 to HELD - 1 transfers beside them; more are as HELD - 1."""

_PACES = 4  # of a transfer that others at its ends slow down

_SAME_S = 1e-12  # what differs by less happens at once
_RELEASE, _POSTING = 1, 2  # kinds of events beside ends, 0; a posting adds its side
_LAST_WAVE = 0.95  # of a kernel: a wave that ends later ends with it


class Job(NamedTuple):
    """A part of a task that holds its queues without a break.

    Attributes:
        queues: The queues that it must head: a kernel's one, a transfer's outgoing and incoming
            one; none for a mere delay.
        ranks: Of each queue, its rank.
        seconds: For how long. Of a kernel, per number of transfers that hold SMs beside it; of a
            transfer, if no kernel runs at either end, and if one does; then the same while another
            of such transfers is under way at an end. One entry if it is all the same.
        after: Jobs that it waits for; of a transfer, that its source does.
        release_s: Not to start before: when the host has launched it.
        wave_s: Of a kernel that fills the GPU, how long a wave of its thread blocks takes; else 0.
        moves: Whether it is a transfer.
        patient: Of a transfer, whether with `blocking` it waits for the last wave of a kernel to
            begin, not for the next wave: all thread blocks launched before it come first.
        messages: Of a transfer, how many messages it is, each of `seconds`, one after another. A
            kernel starts beside the first at the latest, so the others are patient.
        gates: Of a transfer, jobs that its destination waits for before it posts.
        tail_s: Of a kernel, for how long its last part runs, merges of short thread blocks beside
            which a transfer gets its SMs at once.
        early: Of a transfer, whether it comes before a kernel that could start as well, whatever
            others do.
        cores: How many cores it keeps busy while it runs, where ranks share them.
    """

    queues: tuple[int, ...]
    ranks: tuple[int, ...]
    seconds: tuple[float, ...]
    after: tuple[int, ...]
    release_s: float = 0.0
    wave_s: float = 0.0
    moves: bool = False
    patient: bool = False
    messages: int = 1
    gates: tuple[int, ...] = ()
    tail_s: float = 0.0
    early: bool = False
    cores: int = 0


@dataclass(slots=True, eq=False)
class _Rank:
    """State of a rank: its kernel, the holders of its SMs, and transfers under way or waiting."""

    kernel: int = -1
    held: int = 0
    crowd: int = 0
    moving: set[int] = field(default_factory=set)
    blocked: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Line:
    """A queue: its jobs in order, and which of them is its head."""

    jobs: list[int] = field(default_factory=list)
    head: int = 0

    def first(self) -> int:
        """The job at the head; -1 if the queue is empty."""
        return self.jobs[self.head] if self.head < len(self.jobs) else -1


def run_jobs(
    jobs: Sequence[Job],
    *,
    blocking: bool = False,
    kernels_first: bool = False,
    cores: int | None = None,
) -> tuple[list[float], list[float]]:
    """Run all jobs; return when each starts and ends.

    Args:
        jobs: In an order in which every queue serves them.
        blocking: Whether a transfer that comes during a wave of thread blocks waits for its end.
        kernels_first: Whether a kernel and a transfer that could both start are launched in this
            order; matters with `blocking` only.
        cores: How many all ranks share; None where every job has what it needs.

    Raises:
        CycleError: Some jobs wait for one another.
    """
    return _Run(jobs, blocking, kernels_first, cores).run()


class _Run:
    def __init__(
        self, jobs: Sequence[Job], blocking: bool, kernels_first: bool, cores: int | None
    ) -> None:
        self.jobs = jobs
        self.blocking = blocking
        self.kernels_first = kernels_first
        self.cores = cores
        self.busy: dict[int, float] = {}  # what shares the cores, and its pace on its own ones
        self.wanted = 0  # cores, by all of those
        self.turns = 1.0  # how many times longer each takes for that
        self.starts = [0.0] * len(jobs)
        self.ends = [-1.0] * len(jobs)
        self.waits = [len(job.after) for job in jobs]
        self.gated = [len(job.gates) for job in jobs]
        self.followers: list[list[int]] = [[] for _ in jobs]
        self.opened: dict[int, list[int]] = {}  # by job, the transfers whose destinations wait
        self.unposted = [len(job.queues) for job in jobs]  # ends of a transfer still to be posted
        self.asked = [False] * len(jobs), [False] * len(jobs)  # by end: whether it has asked to be
        lines: defaultdict[int, _Line] = defaultdict(_Line)
        ranks: defaultdict[int, _Rank] = defaultdict(_Rank)
        # Jobs share queues and ranks by the thousand, so they share what names them too.
        many_lines: dict[tuple[int, ...], tuple[_Line, ...]] = {}
        many_ranks: dict[tuple[int, ...], tuple[_Rank, ...]] = {}
        self.lines: list[tuple[_Line, ...]] = []
        self.ranks: list[tuple[_Rank, ...]] = []
        for index, job in enumerate(jobs):
            for earlier in job.after:
                self.followers[earlier].append(index)
            for earlier in job.gates:
                self.opened.setdefault(earlier, []).append(index)
            queues, numbers = job.queues, job.ranks
            if queues not in many_lines:
                many_lines[queues] = tuple([lines[queue] for queue in queues])
            if numbers not in many_ranks:
                many_ranks[numbers] = tuple([ranks[number] for number in numbers])
            for line in many_lines[queues]:
                line.jobs.append(index)
            self.lines.append(many_lines[queues])
            self.ranks.append(many_ranks[numbers])
        # (time; 0 an end, 1 a release, 2 and 3 the posting of a side; job; version of an end)
        self.heap: list[tuple[float, int, int, int]] = []
        # Of a job under way: what share is left, as of when, at which pace, under which version.
        self.left = [1.0] * len(jobs)
        self.since_s = [0.0] * len(jobs)
        self.pace_s = [-1.0] * len(jobs)
        self.versions = [0] * len(jobs)
        self.sent = [0] * len(jobs)  # messages of a transfer that have arrived
        self.now = 0.0

    def run(self) -> tuple[list[float], list[float]]:
        touched = list(range(len(self.jobs)))
        while touched or self.heap:
            self.offer(touched)
            touched = self.advance() if self.heap else []
        stuck = [index for index, end in enumerate(self.ends) if end < 0]
        if stuck:
            raise CycleError(
                "no ranks wait for one another",
                rank=None,
                task=stuck[0],
                detail=f"{len(stuck)} parts of tasks never start in this order",
            )
        return self.starts, self.ends

    def advance(self) -> list[int]:
        """Let everything happen that happens at the next moment, all of it before what follows."""
        heap, versions = self.heap, self.versions
        self.now = heap[0][0]
        until = self.now + _SAME_S
        touched: list[int] = []
        postings = []
        while heap and heap[0][0] <= until:
            _, kind, index, version = heappop(heap)
            if kind == _RELEASE:
                touched.append(index)
            elif kind:
                postings.append((index, kind - _POSTING))
            elif versions[index] == version:
                self.end(index, self.jobs[index], touched)
        for index, side in postings:
            self.post(index, side)
        return touched

    def end(self, index: int, job: Job, touched: list[int]) -> None:
        """End a job, or a message of it; note those that may have become ready."""
        moves = job.moves
        if moves:
            self.leave(index, job)
            self.sent[index] += 1
            if self.sent[index] < job.messages:
                self.again(index)
                return
        self.ends[index] = self.now
        waits = self.waits
        for follower in self.followers[index]:
            waits[follower] -= 1
            if not waits[follower]:
                touched.append(follower)
        for follower in self.opened.get(index, ()):
            self.gated[follower] -= 1
            if not self.gated[follower]:
                touched.append(follower)
        for line in self.lines[index]:
            line.head += 1
            if line.head < len(line.jobs):
                touched.append(line.jobs[line.head])
        ranks = self.ranks[index]
        if not moves:
            self.rest(index)
        if ranks and not moves:
            rank = ranks[0]
            rank.kernel = -1
            if rank.blocked:
                blocked, rank.blocked = rank.blocked, []
                for waiting, side in blocked:
                    self.post(waiting, side)
            if rank.moving:
                self.aim_moving(rank)

    def leave(self, index: int, job: Job) -> None:
        """Let a message give back what it held at both ends."""
        self.rest(index)
        for rank in self.ranks[index]:
            rank.moving.discard(index)
            self.hold(rank, -1)
        if len(job.seconds) == _PACES:
            self.crowd(index, -1)

    def again(self, index: int) -> None:
        """Post the next message of a transfer."""
        self.left[index], self.pace_s[index] = 1.0, -1.0
        sides = len(self.ranks[index])
        self.unposted[index] = sides  # both have asked before, so `offer_transfer` leaves them be
        for side in range(sides):
            self.ask(index, side)

    def offer(self, touched: list[int]) -> None:
        """Start or post what can be, of some jobs: transfers first, or kernels first."""
        jobs, ends = self.jobs, self.ends
        before: list[int] = []
        kernels: list[int] = []
        behind: list[int] = []
        for index in touched:
            job = jobs[index]
            if not job.moves:
                kernels.append(index)
            elif self.kernels_first and not job.early:
                behind.append(index)
            else:
                before.append(index)
        self.offer_transfers(before)
        for index in kernels:
            if ends[index] < 0 and not self.waits[index]:
                for line in self.lines[index]:
                    if line.first() != index:
                        break
                else:
                    self.offer_kernel(index, jobs[index])
        self.offer_transfers(behind)

    def offer_transfers(self, transfers: Sequence[int]) -> None:
        """Post some transfers that have not ended, as far as they can be."""
        for index in transfers:
            if self.ends[index] < 0:
                self.offer_transfer(index, self.jobs[index])

    def offer_kernel(self, index: int, job: Job) -> None:
        if job.release_s > self.now:
            heappush(self.heap, (job.release_s, _RELEASE, index, 0))
            return
        self.starts[index] = self.now
        self.ends[index] = self.now  # taken; the true end follows
        ranks = self.ranks[index]
        if not ranks:
            self.aim(index, job.seconds[0])
            return
        rank = ranks[0]
        rank.kernel = index
        self.since_s[index] = self.now
        self.aim(index, job.seconds[min(rank.held, len(job.seconds) - 1)])
        if rank.moving:
            self.aim_moving(rank)

    def offer_transfer(self, index: int, job: Job) -> None:
        if job.release_s > self.now:
            heappush(self.heap, (job.release_s, _RELEASE, index, 0))
            return
        waits = self.waits[index], self.gated[index]
        for side, line in enumerate(self.lines[index]):
            if waits[side]:
                continue
            asked = self.asked[side]
            if asked[index] or line.first() != index:
                continue
            asked[index] = True
            self.ask(index, side)

    def ask(self, index: int, side: int) -> None:
        """Post one end of a transfer as soon as there are SMs for it."""
        rank = self.ranks[index][side]
        if self.blocking and rank.kernel >= 0 and self.jobs[rank.kernel].wave_s:
            self.block(rank, index, side)
        else:
            self.post(index, side)

    def block(self, rank: _Rank, index: int, side: int) -> None:
        """Post one end of a transfer when thread blocks there let it have SMs."""
        number, job = rank.kernel, self.jobs[index]
        kernel = self.jobs[number]
        done, start = self.now - self.starts[number], self.starts[number]
        wave = start + (int(done / kernel.wave_s) + 1) * kernel.wave_s
        if job.patient or self.sent[index]:
            # All blocks of the kernel come first: its last wave begins a wave before it ends.
            left = self.left[number] - (self.now - self.since_s[number]) / self.pace_s[number]
            end = self.now + left * self.pace_s[number]
            wave = max(self.now, end - kernel.wave_s - kernel.tail_s)
        if wave - start < kernel.seconds[0] * _LAST_WAVE:
            heappush(self.heap, (wave, _POSTING + side, index, 0))
        else:
            rank.blocked.append((index, side))

    def post(self, index: int, side: int) -> None:
        """Post one end of a transfer; start it if that was the last."""
        ranks = self.ranks[index]
        self.hold(ranks[side], 1)
        self.unposted[index] -= 1
        if not self.unposted[index]:
            job = self.jobs[index]
            self.since_s[index] = self.now
            if not self.sent[index]:
                self.starts[index] = self.now
            for rank in ranks:
                rank.moving.add(index)
            if len(job.seconds) == _PACES:
                self.crowd(index, 1)
            self.aim(index, job.seconds[self.pace_of(index, job)])

    def crowd(self, index: int, change: int) -> None:
        """Let others at both ends of a transfer know that it moves, or that it does no more."""
        for rank in self.ranks[index]:
            rank.crowd += change
            if rank.crowd >= 1:
                self.aim_moving(rank)

    def pace_of(self, index: int, job: Job) -> int:
        """Which of its paces a transfer has."""
        paces = len(job.seconds)
        if paces == 1:
            return 0
        pace = 0
        for rank in self.ranks[index]:
            if rank.kernel >= 0:
                pace |= 1
            if rank.crowd > 1 and paces == _PACES:
                pace |= 2
        return pace

    def hold(self, rank: _Rank, change: int) -> None:
        """Let a transfer take or give back SMs of a rank."""
        rank.held += change
        if rank.kernel >= 0:
            seconds = self.jobs[rank.kernel].seconds
            if len(seconds) > 1:
                self.aim(rank.kernel, seconds[min(rank.held, len(seconds) - 1)])

    def aim_moving(self, rank: _Rank) -> None:
        """Let transfers at a rank run on at the pace that they have now."""
        moving = rank.moving
        for index in sorted(moving) if len(moving) > 1 else tuple(moving):
            job = self.jobs[index]
            if len(job.seconds) > 1:
                self.aim(index, job.seconds[self.pace_of(index, job)])

    def rest(self, index: int) -> None:
        """Let a job give back its cores."""
        if self.busy.pop(index, None) is not None:
            self.take_turns(-self.jobs[index].cores)

    def take_turns(self, change: int) -> None:
        """Deal the cores to all that is under way, when so many more are wanted."""
        assert self.cores is not None
        self.wanted += change
        turns = max(1.0, self.wanted / self.cores)
        if turns != self.turns:
            self.turns = turns
            for index, pace_s in self.busy.items():
                self.slow(index, pace_s * turns)

    def aim(self, index: int, pace_s: float) -> None:
        """Set when a job ends if all of it took `pace_s` on cores of its own."""
        if self.cores is None or not self.jobs[index].cores:
            self.slow(index, pace_s)
            return
        new = index not in self.busy
        self.busy[index] = pace_s
        if new:
            self.take_turns(self.jobs[index].cores)
        self.slow(index, pace_s * self.turns)

    def slow(self, index: int, pace_s: float) -> None:
        """Set when a job ends if all of it took `pace_s`, as things are now."""
        before = self.pace_s[index]
        if before == pace_s:
            return
        now = self.now
        left = self.left[index]
        if before > 0:
            left = self.left[index] = max(0.0, left - (now - self.since_s[index]) / before)
        self.since_s[index], self.pace_s[index] = now, pace_s
        version = self.versions[index] = self.versions[index] + 1
        heappush(self.heap, (now + left * pace_s, 0, index, version))

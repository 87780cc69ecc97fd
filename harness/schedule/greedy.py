"""Greedy choice of transformations: the largest gain first, kept only if the whole plan gains.

Gain is what the replaced tasks take one after another less what their replacement takes. It sets
the order of the tries and nothing else: a replacement may delay what could have run earlier, so
each try is timed on the graph of the whole plan, and undone unless that got better. Only what a
replacement delays or hastens is timed again, so a try costs far less than the graph.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from harness.cluster.machine import Cluster
from harness.plan.dependencies import rebuilt, resolved
from harness.plan.plan import Plan
from harness.plan.tasks import Task, Tile
from harness.schedule.substitute import Members
from harness.simulate.task_costs import costs_on
from harness.simulate.timeline import Timeline, graph_of

_LEAST = 1e-12  # relative: what is shorter by less is rounding
MOST_TRIES = 20_000


@dataclass(frozen=True, slots=True)
class Replacement:
    """One task in the place of several.

    Attributes:
        members: Ids of the tasks that it replaces.
        task: The replacement.
        seconds: How long that takes.
        streams: The streams that it holds.
        gain_s: How much less than its members one after another, seconds.
        late: Whether it takes its last member's place on a stream, else its first's.
        lag_s: Seconds that pass before it holds its streams.
    """

    members: Members
    task: Task
    seconds: float
    streams: tuple[int, ...]
    gain_s: float
    late: bool
    lag_s: float = 0.0


class TimedPlan:
    """A plan on a cluster, with all that finders of replacements ask.

    Args:
        plan: The plan; its order is the order of every stream.
        cluster: Where it runs.
    """

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self.plan = plan
        self.cluster = cluster
        self.program = resolved(plan)
        self.costs = costs_on(self.program, cluster)
        self.graph = graph_of(plan, cluster)
        self.timeline = Timeline(self.graph)
        areas = plan.problem.pattern.areas(plan.q_chunks, plan.kv_chunks)
        self._areas: list[list[int]] = areas.tolist()
        self._ready = [
            max((self.timeline.end[first] for first in earlier), default=0.0)
            for earlier in self.graph.after
        ]

    def tile(self, index: int) -> Tile:
        """A task that is known to be a tile."""
        task = self.plan.tasks[index]
        assert isinstance(task, Tile)
        return task

    def ready_s(self, index: int) -> float:
        """Time at which all dependencies of a task have ended."""
        return self._ready[index]

    def partial(self, index: int) -> bool:
        """Whether a tile is masked in part."""
        tile = self.tile(index)
        rows, columns = (self.plan.tokens(piece) for piece in tile.reads[:2])
        return tile.area < rows * columns

    def whole(self, members: Members) -> bool:
        """Whether tiles have all pairs of their rows x columns."""
        tiles = [self.tile(index) for index in members]
        q = {chunk for tile in tiles for chunk in tile.q}
        kv = {chunk for tile in tiles for chunk in tile.kv}
        return sum(tile.area for tile in tiles) == sum(self._areas[i][j] for i in q for j in kv)

    def rank(self, each: Replacement) -> tuple[int, float, Members]:
        """Largest gain first, to the picosecond; of equal ones that which waits for least."""
        ready_s = max(self._ready[index] for index in each.members)
        return -round(each.gain_s * 1e12), ready_s, each.members


Finder = Callable[[TimedPlan], Iterable[Replacement]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Improved:
    """Result of a greedy choice.

    Attributes:
        plan: The plan with what was kept.
        before_s: Makespan before.
        after_s: Makespan after; equal to `before_s` if nothing was kept.
        found: Replacements that would gain.
        tried: Of these, those that did not meet a task already replaced.
        kept: Tasks that replaced others, in the order in which they did.
    """

    plan: Plan
    before_s: float
    after_s: float
    found: int
    tried: int
    kept: tuple[Task, ...]


def improve(
    plan: Plan,
    cluster: Cluster,
    finders: Sequence[Finder],
    *,
    evaluate: Callable[[Plan], float] | None = None,
    most_tries: int = MOST_TRIES,
) -> Improved:
    """Apply transformations, the largest gain first, each kept only if it pays.

    It pays if the makespan gets shorter, or if it stays and streams do not fall idle later in all:
    in a balanced plan no single rank's gain shortens the whole until every rank has its own.

    Args:
        plan: A plan; edges that its tasks do not need go (see `post_late`).
        cluster: Where it runs.
        finders: Functions that find replacements.
        evaluate: Seconds of a whole plan, the timeline's own by default. The result is judged by
            it once more, and given up if it takes longer.
        most_tries: Stop after so many tries.
    """
    timed = TimedPlan(plan, cluster)
    before_s = timed.timeline.makespan
    found = [each for finder in finders for each in finder(timed) if each.gain_s > 0]
    found.sort(key=timed.rank)
    choice = _Choice(timed)
    for each in found:
        if choice.tried == most_tries:
            break
        choice.offer(each)
    better = _judged(plan, cluster, choice, evaluate) if choice.kept else None
    return Improved(
        plan=better[0] if better else rebuilt(plan, plan.tasks),
        before_s=before_s,
        after_s=better[1] if better else before_s,
        found=len(found),
        tried=choice.tried,
        kept=tuple(choice.kept) if better else (),
    )


class _Choice:
    """The replacements that pay, applied to a timeline one after another."""

    def __init__(self, timed: TimedPlan) -> None:
        self.line = timed.timeline
        self.tasks: dict[int, Task] = dict(enumerate(timed.plan.tasks))
        self.kept: list[Task] = []
        self.tried = 0
        self._gone: set[int] = set()
        self.before_s = self._best_s = self.line.makespan
        self._idle_s = self.line.idle

    def offer(self, each: Replacement) -> None:
        """Apply a replacement, if its members are still there and it pays."""
        if not self._gone.isdisjoint(each.members):
            return
        self.tried += 1
        change = self.line.replace(
            each.members,
            each.seconds,
            each.streams,
            late=each.late,
            lag_s=each.lag_s,
            limit_s=self._best_s * (1 + _LEAST),
        )
        if change is None:
            return
        makespan_s, idle_s = self.line.makespan, self.line.idle
        if makespan_s >= self._best_s * (1 - _LEAST) and idle_s > self._idle_s * (1 + _LEAST):
            change.undo()
            return
        self._best_s, self._idle_s = min(self._best_s, makespan_s), idle_s
        self._gone.update(each.members)
        self.tasks[change.node] = each.task
        self.kept.append(each.task)


def _judged(
    plan: Plan, cluster: Cluster, choice: _Choice, evaluate: Callable[[Plan], float] | None
) -> tuple[Plan, float] | None:
    """Return the changed plan and its seconds; None if it takes longer than the plan as it was."""
    judge = evaluate or (lambda one: Timeline(graph_of(one, cluster)).makespan)
    changed = rebuilt(plan, (choice.tasks[node] for node in choice.line.order()))
    after_s = judge(changed)
    before_s = judge(rebuilt(plan, plan.tasks)) if evaluate else choice.before_s
    return (changed, after_s) if after_s <= before_s else None

"""Heads and context in one plan: some ranks share heads, the others share tokens.

Ranks that hold the same part of the context trade its tokens for heads (all-to-alls). Then the
ranks of one share of the heads attend as if they were alone, by any plan of the context alone, and
results are traded back. How many share heads is chosen apart inside nodes and between them:

    2 nodes of 4 GPUs, heads 2 inside x 1 between       rank = (node, part of context, heads)
    node 0   c0h0 c0h1 c1h0 c1h1                        c0h0 and c0h1 trade heads over NVLink;
    node 1   c2h0 c2h1 c3h0 c3h1                        c0h0 c1h0 c2h0 c3h0 share the context

    heads 1 inside x 2 between
    node 0   c0h0 c1h0 c2h0 c3h0                        c0h0 and c0h1 trade heads over their NICs;
    node 1   c0h1 c1h1 c2h1 c3h1                        what context needs stays inside the node

The heads of a rank may be attended in stages, one KV head or several at a time: the keys of a
stage arrive while the one before it is attended, and no partial output is merged for that.

Source: DeepSpeed-Ulysses (arXiv:2309.14509) for the trade; USP (arXiv:2405.07719) for heads x ring.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from harness.errors import UnsupportedError
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Sharding, cut_each
from harness.plan.tasks import (
    GATHERED,
    Collective,
    Finish,
    Leg,
    Merge,
    Piece,
    Place,
    Task,
    Tensor,
    Tile,
    Transfer,
)
from harness.planning.builder import KV, OUT_PARTS, PlanBuilder, balanced_heads
from harness.planning.collectives import (
    HeadGroups,
    hold_for_heads,
    kv_grads_to_tokens,
    save_for_heads,
    seats_of,
    to_heads,
    to_tokens,
)
from harness.planning.need import NeedCut, Parts, cut_at_need
from harness.planning.token_owners import finish_tokens, hold_tokens, output_gradients

ContextPlan = Callable[[Problem, tuple[Sharding, Sharding]], Plan]
"""Plan of the context alone: (problem of the ranks that share one part of the heads, who owns what
among them) -> a plan that starts and ends at token owners, over just these chunks."""

_INPUTS = frozenset({Tensor.Q, Tensor.K, Tensor.V, Tensor.DOUT})


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMesh:
    """Which ranks share heads.

    Attributes:
        nodes: Nodes.
        gpus: Ranks of a node.
        inside: Shares of the heads inside a node; divides `gpus`.
        between: The same between nodes; divides `nodes`.
        stages: Stages in which each rank attends its heads.
    """

    nodes: int
    gpus: int
    inside: int = 1
    between: int = 1
    stages: int = 1

    @property
    def shares(self) -> int:
        """Into how many shares the heads are cut."""
        return self.inside * self.between

    @property
    def parts(self) -> int:
        """Into how many parts the context is cut."""
        return self.nodes * self.gpus // self.shares

    @property
    def neighbours(self) -> int:
        """How many parts of the context share a node."""
        return self.gpus // self.inside

    def rank(self, part: int, share: int) -> int:
        """The rank of a part of the context and a share of the heads."""
        (node, gpu), (far, near) = divmod(part, self.neighbours), divmod(share, self.inside)
        return (node * self.between + far) * self.gpus + gpu * self.inside + near

    def spread(self, pieces_of: Sequence[Sequence[int]], cut: Parts) -> Sharding:
        """Give what each part of the context owns to its ranks: of every chunk, one piece each.

        Args:
            pieces_of: Per part, its chunks, each cut into `shares` pieces that follow one another.
            cut: Those pieces, cut where need ends.
        """
        owned: dict[int, tuple[int, ...]] = {}
        for part, mine in enumerate(pieces_of):
            for share in range(self.shares):
                pieces = mine[share :: self.shares]
                owned[self.rank(part, share)] = tuple(c for piece in pieces for c in cut.of[piece])
        return Sharding(cut.sharding.chunks, tuple(owned[rank] for rank in sorted(owned)))

    def can(self, problem: Problem) -> bool:
        """Whether every rank gets heads, in every stage, and no stage cuts a KV head."""
        runs = self.shares * self.stages
        return self.shares <= problem.heads_q and (self.stages == 1 or problem.heads_kv % runs == 0)


def plan_heads(
    problem: Problem,
    name: str,
    direction: Direction,
    mesh: HeadMesh,
    dealt: tuple[Sharding, Sharding],
    context_plan: ContextPlan,
) -> Plan:
    """Plan a mesh of heads and context.

    Args:
        problem: The problem; cp = nodes x GPUs of the mesh.
        name: Name that the plan will carry.
        direction: Forward or backward.
        mesh: Which ranks share heads.
        dealt: Who owns queries, and keys, among as many ranks as the context has parts.
        context_plan: How the ranks of one share of the heads attend.

    Raises:
        UnsupportedError: The heads cannot be shared so.
    """
    if not mesh.can(problem):
        raise UnsupportedError(
            f"{name}: {mesh.inside} x {mesh.between} shares of heads in {mesh.stages} stages must "
            f"not exceed heads_q ({problem.heads_q}), and stages must divide the KV heads "
            f"({problem.heads_kv}) of each share"
        )
    builder = _MeshPlan(problem, name, direction, mesh, dealt, context_plan)
    return builder.build()


class _MeshPlan:
    """The parts of a plan of heads and context."""

    def __init__(
        self,
        problem: Problem,
        name: str,
        direction: Direction,
        mesh: HeadMesh,
        dealt: tuple[Sharding, Sharding],
        context_plan: ContextPlan,
    ) -> None:
        self.mesh, self.forward = mesh, direction is Direction.FORWARD
        fine = [cut_each(each, mesh.shares) for each in dealt]
        parts = cut_at_need(problem.pattern, fine[0], fine[1], NeedCut.KEYS, range(mesh.parts))
        queries, keys = (mesh.spread(f.owned, cut) for f, cut in zip(fine, parts, strict=True))
        self.b = PlanBuilder(problem, name, direction, queries, keys, cut=NeedCut.WHOLE)
        self.heads = balanced_heads(problem, mesh.shares * mesh.stages)
        self.lanes = _lanes(self, context_plan, (parts[0].sharding, parts[1].sharding))

    @property
    def trades(self) -> bool:
        """Whether tokens are traded for heads."""
        return self.mesh.shares > 1

    def groups(self, stages: Sequence[int]) -> HeadGroups:
        """Who trades, for the heads of some stages."""
        mesh, heads = self.mesh, [0] * self.b.problem.cp
        for share in range(mesh.shares):
            mine = reduce(or_, (self.stage_heads(share, stage) for stage in stages))
            for part in range(mesh.parts):
                heads[mesh.rank(part, share)] = mine
        groups = tuple(
            tuple(mesh.rank(part, share) for share in range(mesh.shares))
            for part in range(mesh.parts)
        )
        return HeadGroups(groups, tuple(heads))

    def stage_heads(self, share: int, stage: int) -> int:
        """The query heads of a share in a stage."""
        return self.heads[share * self.mesh.stages + stage]

    def build(self) -> Plan:
        """Return the plan: a stage's operands are brought before the last one is attended."""
        b, stages = self.b, range(self.mesh.stages)
        groups = [self.groups([stage]) for stage in stages]
        self._start()
        found: list[tuple[int, Piece]] = []
        for stage in stages:
            self._bring(stage, groups[stage])
            if stage:
                found += self._attend(stage - 1, groups[stage - 1])
        found += self._attend(stages[-1], groups[-1])
        self._end(found)
        return b.build()

    def _start(self) -> None:
        b = self.b
        if self.trades:
            hold_for_heads(b, seats_of(b, self.groups(range(self.mesh.stages))))
        else:
            for rank in range(b.problem.cp):
                hold_tokens(b, rank)

    def _bring(self, stage: int, groups: HeadGroups) -> None:
        if self.trades:
            for tensor in (Tensor.Q, *KV) if self.forward else (Tensor.DOUT,):
                to_heads(self.b, groups, tensor)
        for task in self._tasks(stage, before=True):
            self.b.add(task)

    def _attend(self, stage: int, groups: HeadGroups) -> list[tuple[int, Piece]]:
        """Attend a stage, trade its results back, and return where dk and dv then are."""
        for task in self._tasks(stage, before=False):
            self.b.add(task)
        if not self.trades:
            return []
        to_tokens(self.b, groups, Tensor.OUT if self.forward else Tensor.DQ)
        return [] if self.forward else kv_grads_to_tokens(self.b, groups)

    def _end(self, gradients: Sequence[tuple[int, Piece]]) -> None:
        b, ranks = self.b, range(self.b.problem.cp)
        result = Tensor.OUT if self.forward else Tensor.DQ
        for rank in ranks if self.trades else ():
            b.output(rank, [result], b.queries.owned[rank], b.problem.all_heads, GATHERED)
        if self.trades and self.forward:
            save_for_heads(b, seats_of(b, self.groups(range(self.mesh.stages))))
        for rank, piece in gradients:
            b.output_piece(rank, piece)
        for rank in () if self.trades else ranks:
            if self.forward:
                finish_tokens(b, rank)
            else:
                output_gradients(b, rank)

    def _tasks(self, stage: int, *, before: bool) -> Iterator[Task]:
        """Tasks of a stage on all ranks, before the first tile or from it on."""
        for share in range(self.mesh.shares):
            plan = self.lanes[share, stage]
            first = next((i for i, t in enumerate(plan.tasks) if isinstance(t, Tile)), 0)
            place = _Lane(self.b, self.mesh, share, self.stage_heads(share, stage))
            for task in plan.tasks[:first] if before else plan.tasks[first:]:
                moved = place.task(task)
                if moved is not None:
                    yield moved


def _lanes(
    made: _MeshPlan, context_plan: ContextPlan, fine: tuple[Sharding, Sharding]
) -> dict[tuple[int, int], Plan]:
    """Per share and stage, the plan of its context; one for all that have as many heads."""
    problem, known, found = made.b.problem, dict[tuple[int, int], Plan](), {}
    for share in range(made.mesh.shares):
        for stage in range(made.mesh.stages):
            heads = made.stage_heads(share, stage)
            queries = heads.bit_count()
            keys = problem.kv_heads(heads).bit_count()
            shape = queries, keys if queries % keys == 0 else queries
            if shape not in known:
                lane = replace(problem, cp=made.mesh.parts, heads_q=shape[0], heads_kv=shape[1])
                plan = known[shape] = context_plan(lane, fine)
                if (plan.q_chunks, plan.kv_chunks) != tuple(each.chunks for each in fine):
                    raise ValueError("a plan of the context must cut tokens as it was told")
            found[share, stage] = known[shape]
    return found


@dataclass(frozen=True, slots=True)
class _Lane:
    """Places, heads and versions of one share's tasks, in one stage.

    Attributes:
        b: Names the pieces.
        mesh: Which ranks share heads.
        share: The share of the heads.
        heads: Its query heads.
    """

    b: PlanBuilder
    mesh: HeadMesh
    share: int
    heads: int

    def task(self, task: Task) -> Task | None:
        """A task of the context's plan as it is done here; None if the trade back does it."""
        match task:
            case Tile():
                reads, writes = map(self.pieces, (task.reads, task.writes))
                return replace(task, place=self.place(task.place), reads=reads, writes=writes)
            case Transfer():
                return replace(task, leg=self.leg(task.leg))
            case Collective():
                return replace(task, legs=tuple(map(self.leg, task.legs)))
            case Merge():
                return replace(
                    task, place=self.place(task.place), sources=self.pieces(task.sources)
                )
            case Finish():
                if self.later(task.parts[0].tensor):
                    return None
                return replace(task, place=self.place(task.place), parts=self.pieces(task.parts))
            case _:
                raise AssertionError(f"{task} is of no plan of attention alone")

    def later(self, part: Tensor) -> bool:
        """Whether a result is finished after all stages: where its copies were summed, or whole.

        Out that its owner saves is one tensor of all heads.
        """
        return part.on_kv if self.mesh.shares > 1 else part in OUT_PARTS

    def place(self, place: Place) -> Place:
        """Where a part of the context is."""
        return place._replace(rank=self.mesh.rank(place.rank, self.share))

    def pieces(self, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        """Pieces with this lane's heads."""
        return tuple(self.piece(piece) for piece in pieces)

    def piece(self, piece: Piece) -> Piece:
        """A piece with this lane's heads; what was traded is a version of its own."""
        version = self.version(piece.tensor, piece.version)
        return self.b.piece(piece.tensor, piece.chunks, self.heads, version)

    def version(self, tensor: Tensor, version: int) -> int:
        """The version of what the context's plan calls `version`.

        Copies of inputs come after the one that was traded; partial results are told apart by the
        ranks of the context, of which each rank here stands for one.
        """
        return version + GATHERED if self.mesh.shares > 1 and tensor in _INPUTS else version

    def leg(self, leg: Leg) -> Leg:
        """A leg with this lane's heads; copies of inputs as in `version`."""
        (shift,) = {self.version(piece.tensor, 0) for piece in leg.pieces}
        return Leg(
            self.place(leg.src), self.place(leg.dst), self.pieces(leg.pieces), leg.version + shift
        )

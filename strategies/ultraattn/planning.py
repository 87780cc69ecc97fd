"""State that all steps of one planning share: the problem, the mode and the machine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from harness.base.cache import cache_folder
from harness.cluster.machine import Cluster
from harness.plan.plan import Plan
from harness.plan.problem import Problem
from harness.planning.levels import Level
from harness.planning.need import NeedCut
from harness.planning.planned_for import machine_of, nodes_and_gpus
from harness.planning.strategy import Context
from strategies.ultraattn.finish import seconds_of
from strategies.ultraattn.layout import Layout, layouts, own_layout
from strategies.ultraattn.nodes import Nodes
from strategies.ultraattn.selection import Favour
from strategies.ultraattn.solver.assign import DEFAULT_S
from strategies.ultraattn.solver.store import Cache

NAME = "ultraattn"

Judge = Callable[[Plan], float]
"""Seconds of a plan, by what a calibration knows beyond the timeline: transfers slow kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningMode:
    """How to plan.

    Attributes:
        levels: Those that are on.
        seconds: CPU seconds per distinct tiling and per schedule.
        prove: Go for proofs.
        published: Only what the paper's public code does: its own orders, diagonal blocks at their
            owners, chunks counted and not weighed, its slack, fusing at once, and nothing compared.
        favour: The direction that counts.
    """

    levels: frozenset[Level]
    seconds: float = DEFAULT_S
    prove: bool = False
    published: bool = False
    favour: Favour = Favour.BOTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """One planning.

    Attributes:
        problem: The problem.
        mode: How to plan.
        machine: The cluster, with as many nodes as the ranks need.
        shape: Its nodes and GPUs that take part.
        public_layout: The one layout of the public code.
        align: Tokens that what is sent of a chunk is rounded up to.
        judge: Present where the cluster is calibrated and the caller can simulate.
        clock: The caller's simulator, or else the planner's own timeline: for plans that are
            compared as they are.
        cache: Tilings that were solved before.
    """

    problem: Problem
    mode: PlanningMode
    machine: Cluster
    shape: Nodes
    public_layout: Layout
    align: int = 1
    judge: Judge | None = None
    clock: Judge
    cache: Cache = field(default_factory=lambda: Cache(cache_folder() / "tiles"))

    @property
    def cut(self) -> NeedCut:
        """What is cut to what is needed: the public code moves whole chunks."""
        return NeedCut.WHOLE if self.mode.published else NeedCut.BLOCKS

    @property
    def remaps(self) -> bool:
        """Whether blocks may lie in another order than the tokens'."""
        return Level.REMAP in self.mode.levels

    @property
    def tiles(self) -> bool:
        """Whether blocks may be computed elsewhere than at the owner of their row."""
        return bool({Level.NODE, Level.DEVICE} & self.mode.levels)

    @property
    def schedules(self) -> bool:
        """Whether streams are ordered."""
        return Level.SCHEDULE in self.mode.levels

    def layouts(self) -> list[Layout]:
        """Return the layouts to try, the tokens' own order first."""
        if self.mode.published:
            return [self.public_layout]
        own = layouts(self.problem, self.shape.nodes, self.shape.gpus, remap=self.remaps)
        return list(dict.fromkeys([*own, self.public_layout]))


def planning_of(problem: Problem, mode: PlanningMode, context: Context) -> Planning:
    """Return the state that all steps of planning a problem share."""
    nodes, gpus = nodes_and_gpus(problem.cp, context.gpus_per_node)
    machine = machine_of(problem, context)
    judge = context.evaluate if machine.fitted is not None else None
    return Planning(
        problem=problem,
        mode=mode,
        machine=machine,
        shape=Nodes(nodes=nodes, gpus=gpus),
        public_layout=own_layout(problem, nodes, gpus, remap=Level.REMAP in mode.levels),
        align=context.align,
        judge=judge and _once(judge),
        clock=context.estimate or partial(seconds_of, machine),
    )


def _once(judge: Judge) -> Judge:
    """Judge each plan once: a judgement is a proof and a simulation."""
    known: dict[int, tuple[Plan, float]] = {}  # by identity, of plans that are held here

    def judged(plan: Plan) -> float:
        if id(plan) not in known:
            known[id(plan)] = plan, judge(plan)
        return known[id(plan)][1]

    return judged

"""From a problem and a strategy's name to proved plans of both directions, kept for reuse."""

from dataclasses import dataclass

from harness.plan.kernel_calls import lower
from harness.plan.problem import Direction, Problem
from harness.plan.residency import Program
from harness.plan.row_blocks import parts
from harness.plan.tasks import Merge, Tensor, Tile
from harness.planning.strategy import Context
from harness.prepare.planner_context import context_for
from harness.proved.plans import proved_once
from harness.records.config import Config
from strategies import strategy


@dataclass(frozen=True, slots=True)
class Planned:
    """A proved forward plan and the backward plan that starts from what it saves."""

    forward: Program
    backward: Program


def planned(problem: Problem, text: str, context: Context | None = None) -> Planned:
    """Plan and prove both directions, and that one can follow the other; remembered.

    Raises:
        UnsupportedError: The strategy cannot do this problem.
        PlanError: The plan is wrong.
        ValueError: The strategy's name or options are.
    """
    chosen = strategy(text)
    return Planned(*(proved_once(chosen, problem, direction, context) for direction in Direction))


def planned_for(config: Config) -> Planned:
    """Plan and prove what a cell runs, for the machine that runs it.

    Raises:
        UnsupportedError, PlanError, ValueError: As `planned`.
    """
    return planned(config.problem, config.strategy, context_for(config.transport))


def roundings_sent(program: Program) -> int:
    """How often a partial gradient is rounded to be sent, at most: once for each rank it visits."""
    problem = program.plan.problem
    return problem.cp if problem.round_sent else 0


def partial_results(program: Program) -> int:
    """How many partial results meet in one accumulator at most: kernel calls and merges."""
    counts: dict[int, int] = {}
    plan = program.plan
    for task, step in zip(plan.tasks, program.steps, strict=True):
        match task:
            case Tile():
                q, kv = (plan.chunks(piece) for piece in task.reads[:2])
                adds = sum(parts(call.mask) for call in lower(plan.problem.pattern, q, kv))
                written = step.accesses[len(task.reads) :]
            case Merge():
                adds = 1
                written = step.accesses[len(task.sources) :]
            case _:
                continue
        for slab in {segment.slab for access in written for segment in access.segments}:
            if program.slabs[slab].piece.tensor is not Tensor.LSE_PART:
                counts[slab] = counts.get(slab, 0) + adds
    return max(counts.values(), default=1)

"""The strategy `auto`: what `recommend` answers, for whoever runs a problem."""

from dataclasses import replace
from functools import lru_cache

from harness.cluster.machine import Cluster
from harness.cluster.presets import DEFAULT_CLUSTER, cluster
from harness.errors import UnsupportedError
from harness.plan.problem import Problem
from harness.plan.tasks import Scope
from harness.prepare.planner_context import context_for
from harness.recommend.answer import recommend
from harness.recommend.question import Asked
from harness.records.config import Config
from patterns import is_spelled_out
from strategies import AUTO, DEFAULT_STRATEGY


@lru_cache(maxsize=256)
def automatic(problem: Problem, machine: Cluster, named: str) -> str:
    """Return the strategy that is recommended for a problem, both directions together.

    The same arguments give the same answer in every process of this code: nothing is timed here.

    Args:
        problem: The problem; its options of scores change nothing.
        machine: Where it runs.
        named: What a user calls the machine.

    Raises:
        UnsupportedError: Nothing runs, or the problem cannot be told in words.
    """
    if problem.cp == 1:
        return DEFAULT_STRATEGY
    if problem.seqlen_q != problem.seqlen_kv or not is_spelled_out(problem.pattern):
        raise UnsupportedError(
            f"{AUTO}: pattern ({problem.pattern.text}) must be one that a name says, over as many "
            f"keys as queries ({problem.seqlen_q} and {problem.seqlen_kv})",
            ("naming a strategy",),
        )
    layer = problem.hidden is not None
    found = recommend(
        Asked(
            machine=machine,
            named=named,
            cp=problem.cp,
            seqlen=problem.seqlen_q,
            heads_q=problem.heads_q,
            heads_kv=problem.heads_kv,
            head_dim=problem.head_dim,
            patterns=((problem.pattern.text, 1),),
            batch=problem.batch,
            dtype=problem.dtype,
            scope=Scope.LAYER if layer else Scope.ATTENTION,
            hidden=problem.hidden,
            rotary=problem.rotary,
            memory_bytes=machine.gpu.memory_bytes,
        ),
        elsewhere=False,
    )
    if found.strategy is None:
        why = found.refused[0]
        raise UnsupportedError(f"{AUTO}: nothing runs; {why.strategy}: {why.reason}")
    return found.strategy


def settled(cell: Config) -> Config:
    """Put what is recommended for a cell whose strategy is `auto`; another stays as it is.

    Raises:
        UnsupportedError, ValueError: As `automatic`; or the cell contradicts itself.
    """
    if cell.strategy != AUTO:
        return cell
    context = None if cell.cluster else context_for(cell.transport)
    here = context.cluster if context else None
    machine = here or cluster(cell.cluster or DEFAULT_CLUSTER)
    return replace(cell, strategy=automatic(cell.problem, machine, cell.cluster or machine.name))

"""Plans that are ready to run: made and proved once, run, and held to the bytes that they name."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import torch

from harness.attention.agreement import Facts, digest_of
from harness.base.remembered import remembered
from harness.errors import PlanError
from harness.execute.interpreter import Run, execute
from harness.execute.rotary import TurnsOf
from harness.execute.transport import Transport
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem, spelled
from harness.plan.residency import Program
from harness.plan.sizes import traffic
from harness.plan.tasks import Resident
from harness.planning.chosen import Chosen
from harness.planning.strategy import Context
from harness.proved.plans import Owners, proved_once, proved_plan
from harness.schedule.lse_home import lse_to_owners


class Ready(NamedTuple):
    """A verified plan, and what is asked of each of its runs.

    Attributes:
        program: The plan, proved and resolved.
        sent_bytes: Bytes that each rank sends in it.
        received_bytes: Bytes that each rank receives in it.
        facts: Its call, problem and hash, for ranks to compare.
        digest: Of the facts.
    """

    program: Program
    sent_bytes: Mapping[int, int]
    received_bytes: Mapping[int, int]
    facts: Facts
    digest: bytes


@remembered
def ready_plan(
    chosen: Chosen,
    problem: Problem,
    direction: Direction,
    context: Context,
    owners: Owners | None = None,
    *,
    lse: bool = False,
    wider: int = 0,
) -> Ready:
    """Plan and verify, once for each problem.

    Args:
        chosen: By whom.
        problem: What is computed.
        direction: Which pass.
        context: What the planner may know of the cluster.
        owners: Who owns which tokens; None takes the plan at its word.
        lse: Let it end with lse at the owners, of which there are some.
        wider: Columns that v, out and their gradients have besides their own.

    Raises:
        PlanError: The plan is wrong, or its tokens lie elsewhere than their owners have them.
    """
    program = proved_once(chosen, problem, direction, context, owners)
    if lse:
        assert owners is not None
        program = proved_plan(lse_to_owners(program.plan, owners[0]), owners)
    if wider:  # the same tasks, so that they start from what the plain forward plan leaves
        wide = replace(problem, head_dim_v=problem.head_dim_v + wider)
        program = proved_plan(replace(program.plan, problem=wide), owners)
    sent, received = (dict(enumerate(side)) for side in traffic(program.plan))
    facts = _facts(program.plan, lse=lse)
    return Ready(program, sent, received, facts, digest_of(facts))


def _facts(plan: Plan, *, lse: bool) -> Facts:
    """Name what ranks must have in common: the call, every field of its problem, the plan."""
    problem = plan.problem
    kind = "attend" if problem.hidden is None else "attention_layer"
    named = {**spelled(problem), "round_sent": problem.round_sent}
    return (
        ("call", f"{kind} {plan.direction.value}{' with lse' if lse else ''}"),
        ("strategy", plan.strategy),
        *((name, str(value)) for name, value in named.items()),
        ("plan", plan.hash),
    )


def run_plan(
    ready: Ready,
    inputs: Mapping[Resident, torch.Tensor],
    transport: Transport,
    turns: TurnsOf | None = None,
) -> Run:
    """Run a plan, whatever autocast is on, and hold what moved against what was planned.

    Args:
        ready: The plan.
        inputs: See `execute`.
        transport: Where the ranks are.
        turns: How tokens of q and k of a layer turn; None = as the problem has them.
    """
    devices = {tensor.device.type for tensor in inputs.values()}
    with ExitStack() as plain:
        for device in devices:
            plain.enter_context(torch.autocast(device, enabled=False))
        run = execute(ready.program, inputs, transport, turns=turns)
    traffic = transport.traffic
    for rank in transport.ranks:
        named = (ready.sent_bytes.get(rank, 0), ready.received_bytes.get(rank, 0))
        moved = (traffic.sent_bytes.get(rank, 0), traffic.received_bytes.get(rank, 0))
        if moved != named:
            raise PlanError(
                "the bytes that move are the bytes that the plan names",
                rank=rank,
                task=None,
                detail=f"sent and received {moved} bytes, planned {named}",
            )
    return run

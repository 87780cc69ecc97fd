"""All ranks of a problem in this process, on global tensors: what one rank alone cannot show."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

import strategies
from harness.attention.lse_gradient import dlse_columns, widened, with_dlse
from harness.attention.ready import ready_plan, run_plan
from harness.execute import shards
from harness.execute.transport import LocalTransport, Transport
from harness.plan.problem import Direction, Problem
from harness.plan.residency import Program
from harness.plan.tasks import Resident, Tensor
from harness.planning.chosen import Chosen
from harness.planning.strategy import Context


class AllRanks(NamedTuple):
    """Result of `run_all`: the global tensors, by the oracle's names.

    Attributes:
        results: "out", "lse" and, with dout, "dq", "dk", "dv", as global tensors.
        forward: The forward plan, resolved.
        backward: The backward plan, resolved; None without dout.
        transports: The transport of each direction.
    """

    results: Mapping[str, torch.Tensor]
    forward: Program
    backward: Program | None
    transports: tuple[Transport, ...]


def run_all(
    problem: Problem,
    strategy: str | Chosen,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    dout: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    context: Context | None = None,
    transport: Callable[[int], Transport] = LocalTransport,
) -> AllRanks:
    """Run all ranks of a problem in this process, on global tensors in original token order.

    Args:
        problem: The problem.
        strategy: By whom; name with options, or chosen.
        q: `(B, heads_q, S, D)`.
        k: `(B, heads_kv, T, D)`.
        v: `(B, heads_kv, T, E)`.
        dout: Gradient of out, `(B, heads_q, S, E)`; None = forward only.
        dlse: Gradient of lse, `(B, heads_q, S)`; None = 0.
        context: Facts of the cluster for the planner.
        transport: Makes a transport that holds all of so many ranks.

    Raises:
        UnsupportedError: The strategy cannot do this problem.
        PlanError: Its plan breaks a rule, or other bytes moved than planned.
    """
    chosen = strategies.strategy(strategy) if isinstance(strategy, str) else strategy
    context = context or Context()
    ranks = range(problem.cp)
    ready = ready_plan(chosen, problem, Direction.FORWARD, context)
    plan = ready.program.plan
    inputs = shards.initial_inputs(plan, {Tensor.Q: q, Tensor.K: k, Tensor.V: v}, ranks)
    transports = [transport(problem.cp)]
    run = run_plan(ready, inputs, transports[0])
    results = {
        "out": shards.collect(plan, {r: run.results[r] for r in plan.outputs}, Tensor.OUT),
        "lse": shards.collect(plan, run.results, Tensor.LSE),
    }
    if dout is None:
        return AllRanks(results, ready.program, None, tuple(transports))
    saved: Mapping[Resident, torch.Tensor] = run.results
    wider = 0 if dlse is None else dlse_columns(problem.dtype)
    if dlse is not None:
        saved = {each: widened(each.piece.tensor, x) for each, x in saved.items()}
        dout = with_dlse(dout, dlse.masked_fill(results["lse"] == -torch.inf, 0.0))
    back = ready_plan(chosen, problem, Direction.BACKWARD, context, wider=wider)
    plan = back.program.plan
    inputs = {
        resident: saved[resident] if resident in saved else shards.take(plan, dout, resident.piece)
        for resident in plan.initial
    }
    transports.append(transport(problem.cp))
    run = run_plan(back, inputs, transports[1])
    for tensor in (Tensor.DQ, Tensor.DK, Tensor.DV):
        results[tensor.value] = shards.collect(plan, run.results, tensor)
    results["dv"] = results["dv"][..., : problem.head_dim_v]
    return AllRanks(results, ready.program, back.program, tuple(transports))

"""Row owner: each block is computed by the owner of its queries, which gets the keys it lacks.

Every key chunk goes straight from its owner to each rank that needs it. No query moves, so there
are no partial outputs; backward, partial dk and dv go straight home.

    causal      k0  k1  k2  k3
    q0          r0                  k0 goes to ranks 1, 2 and 3, k1 to 2 and 3, k2 to 3
    q1          r1  r1
    q2          r2  r2  r2
    q3          r3  r3  r3  r3

It is what UltraAttn leaves when it does not tile devices.
"""

from dataclasses import dataclass

from harness.plan.dealing import deal_tokens
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Placement
from harness.planning.block_assignment import row_owner
from harness.planning.block_transfers import plan_allocation
from harness.planning.need import NeedCut
from harness.planning.options import CHUNK, CHUNK_UNSET, PLACEMENT, option
from harness.planning.strategy import Checks, Context, Strategy, with_chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of the strategy."""

    placement: Placement = option(Placement.CONTIGUOUS, PLACEMENT)
    chunk: int | None = option(None, CHUNK, unset=CHUNK_UNSET)


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan direct transfers of the needed keys; legal for every problem."""
    queries, keys = deal_tokens(problem.pattern, problem.cp, options.placement, options.chunk)
    allocation = row_owner(queries, keys)
    return plan_allocation(
        problem, name, direction, allocation, cut=NeedCut.KEYS, align=context.align
    )


STRATEGY = Strategy(
    name="owner",
    summary="each row's owner gets just the keys that it needs",
    paper="UltraAttn (SC'25), the ablation without device tiling",
    plan=plan,
    defaults=Options(),
    resolve=with_chunk,
    compared=tuple(f"placement={each}" for each in ("zigzag", "balanced", "documents")),
    checks=Checks(options=("placement=ptrr,chunk=4",)),
)

"""Run plans that no strategy in the table makes, and hold their results against the oracle."""

from collections.abc import Sequence

import numpy as np
import torch

from harness.check.cell import planned_traffic, run_both
from harness.execute.transport import LocalTransport
from harness.memory.ledger import ledger
from harness.oracle.inputs import make_inputs
from harness.oracle.tolerance import calibrate, errors, judge
from harness.plan.plan import Plan
from harness.plan.problem import Direction
from harness.plan.tasks import Tensor
from harness.prepare.verified_plans import Planned, partial_results
from harness.verify.pair import check_pair
from harness.verify.proof import verify
from patterns.pattern import Pattern
from patterns.table import TableMask, table_bands
from tests.support import allowed

FLOAT64 = 1e-12


def table_pattern(rows: Sequence[Sequence[int]], seqlen_q: int, seqlen_kv: int) -> Pattern:
    """A block table as a pattern, without a file."""
    table = np.array(rows, dtype=np.int8)
    return Pattern(
        text="cells " + "/".join("".join(map(str, row)) for row in rows),
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        bands=table_bands(table, seqlen_q, seqlen_kv),
        predicate=TableMask(table, seqlen_q, seqlen_kv),
    )


def wrong(forward: Plan, backward: Plan) -> str:
    """Prove both plans and run them; say what differs from the oracle."""
    problem = forward.problem
    check_pair(forward, backward)
    plans = Planned(verify(forward), verify(backward))
    tensors = make_inputs(problem, 3)
    both = run_both(plans, tensors, lambda: LocalTransport(problem.cp), account=True)
    q, k, v, dout = (tensors[t] for t in (Tensor.Q, Tensor.K, Tensor.V, Tensor.DOUT))
    tolerance = calibrate(q, k, v, allowed(problem), scale=problem.softmax_scale, dout=dout)
    if q.dtype == torch.float64:
        found = [
            f"{name} is off by {error}"
            for name, error in errors(both.results, tolerance).items()
            if not error < FLOAT64
        ]
    else:
        merges = max(partial_results(plans.forward), partial_results(plans.backward)) - 1
        verdicts = judge(both.results, tolerance, merges=merges)
        found = [str(verdict) for verdict in verdicts if not verdict.passed]
    for direction, program in zip(Direction, (plans.forward, plans.backward), strict=True):
        sent, received = planned_traffic(program.plan)
        if (both.traffic[direction].sent_bytes, both.traffic[direction].received_bytes) != (
            sent,
            received,
        ):
            found.append(f"{direction} moves other bytes than the plan says")
        # After the ranks' devices come their hosts, which hold nothing here.
        if both.peaks[direction][: problem.cp] != list(ledger(program).peak_bytes):
            found.append(f"{direction} holds other bytes than the ledger says")
    return "; ".join(found)

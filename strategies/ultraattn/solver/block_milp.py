"""The block-wise integer program, for SCIP: the paper's model with fewer variables and more cuts.

Sets: blocks b = (i, j), devices d. Variables: x[b, d] binary, d computes b; q[i, d] and k[j, d]
binary, d needs row i or column j that it does not own. The paper's A, B, C, D are sums of q and k
and are written out. Constraints:

    sum_d x[b, d] = 1;  x[b, d] <= q[i, d], k[j, d];  work of d <= cap;
    received, sent of d <= V;
    work of d <= alpha * A_d + beta * B_d + gamma     (cuts from `bounds.reach`)

Source: UltraAttn (SC'25), Tables 2 and 3.
"""

from typing import TYPE_CHECKING

import numpy as np

from harness.schedule.scip import PROOF, SolverAnswer, SolverStatus, new_model, solve
from strategies.ultraattn.solver.bounds import reach
from strategies.ultraattn.solver.instance import Instance
from strategies.ultraattn.solver.search import Assignment

if TYPE_CHECKING:
    from pyscipopt import Variable

_CUTS = 10  # per device


def decide_by_blocks(
    instance: Instance, most: int, seconds: float, *, seed: int = 0, log: bool = False
) -> tuple[SolverAnswer, Assignment | None]:
    """Decide whether no device need receive or send more than `most`.

    Returns:
        INFEASIBLE is a proof that none exists; with a plan, the devices of the blocks.
    """
    from pyscipopt import quicksum

    n, w, blocks = instance.devices, instance.weights, instance.blocks
    model = new_model("blocks", log=log)
    fixed = {(i, j): d for i, j, d in instance.fixed}
    x = [[model.addVar(f"x_{i}_{j}_{d}", "B") for d in range(n)] for i, j in blocks]
    need: list[dict[tuple[int, int], Variable]] = [{}, {}]
    for line, owners in enumerate((instance.row_owner, instance.column_owner)):
        for chunk in sorted({block[line] for block in blocks}):
            for d in range(n):
                if owners[chunk] != d:
                    variable = model.addVar(f"{'qk'[line]}_{chunk}_{d}", "B")
                    model.chgVarBranchPriority(variable, 1)
                    need[line][chunk, d] = variable
    for b, block in enumerate(blocks):
        model.addCons(quicksum(x[b]) == 1, f"once_{block[0]}_{block[1]}")
        if block in fixed:
            model.fixVar(x[b][fixed[block]], 1)
        for d in range(n):
            for line in (0, 1):
                if (block[line], d) in need[line]:
                    model.addCons(x[b][d] <= need[line][block[line], d])
    covers = reach(instance)
    for d in range(n):
        work = quicksum(instance.work[i][j] * x[b][d] for b, (i, j) in enumerate(blocks))
        model.addCons(work <= instance.cap, f"cap_{d}")
        a, b_ = (quicksum(v for (_, e), v in need[line].items() if e == d) for line in (0, 1))
        for alpha, beta, gamma in _cuts(covers.work[d], w.row_in, w.column_in, most):
            model.addCons(work <= alpha * a + beta * b_ + gamma)
        lent = [
            quicksum(v for (chunk, _), v in need[line].items() if owners[chunk] == d)
            for line, owners in enumerate((instance.row_owner, instance.column_owner))
        ]
        inside = quicksum(
            instance.inside_of(i, j) * x[b][d]
            for b, (i, j) in enumerate(blocks)
            if instance.inside_of(i, j)
        )
        received = w.row_in * a + w.column_in * b_ + w.row_out * lent[0] + w.column_out * lent[1]
        sent = w.row_out * a + w.column_out * b_ + w.row_in * lent[0] + w.column_in * lent[1]
        model.addCons(received + inside <= most, f"received_{d}")
        model.addCons(sent + inside <= most, f"sent_{d}")
    answer = solve(
        model,
        time_limit_s=seconds,
        seed=seed,
        settings={**PROOF, "limits/solutions": 1},
    )
    if answer.status in (SolverStatus.INFEASIBLE, SolverStatus.TIME_LIMIT):
        return answer, None
    best = model.getBestSol()
    assert best is not None
    return answer, tuple(int(np.argmax([best[variable] for variable in row])) for row in x)


def _cuts(table: np.ndarray, row: int, column: int, most: int) -> list[tuple[int, int, int]]:
    """Return (alpha, beta, gamma) with table[a, b] <= alpha a + beta b + gamma where it matters."""
    a, b = np.indices(table.shape)
    used = row * a + column * b <= most
    gains_a = sorted({0, *np.diff(table, axis=0).ravel().tolist()})
    gains_b = sorted({0, *np.diff(table, axis=1).ravel().tolist()})
    found = []
    for alpha in gains_a[:: max(1, len(gains_a) // 8)]:
        for beta in gains_b[:: max(1, len(gains_b) // 8)]:
            gamma = int((table - alpha * a - beta * b)[used].max())
            over = (alpha * a + beta * b + gamma - table)[used]
            found.append((-int((over == 0).sum()), int(over.sum()), (alpha, beta, gamma)))
    return [cut for _, _, cut in sorted(found)[:_CUTS]]

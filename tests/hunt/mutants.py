"""Plans that are changed in their JSON form, which then perhaps no reader takes."""

import json
from random import Random

from harness.plan.plan import Plan, to_json
from tests.hunt.body import Body
from tests.hunt.rewrites import REWRITES
from tests.hunt.slips import SLIPS
from tests.hunt.truth import allowed_of


def mutant(plan: Plan, rng: Random) -> str:
    """Return another plan as JSON: one to three changes, then perhaps its edges made right."""
    body = json.loads(to_json(plan))
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        change = rng.choice(rng.choice((SLIPS, SLIPS, REWRITES)))
        try:
            change(body, rng)
        except (IndexError, ValueError):  # nothing left to choose from
            continue
    if rng.random() < 0.8:
        for index, task in enumerate(body["tasks"]):
            task[-1] = list(range(index))
    if rng.random() < 0.8:
        _measure(body, plan)
    return json.dumps(body)


def _measure(body: Body, plan: Plan) -> None:
    """Give tiles the areas that they have."""
    chunks = [chunk for name in ("q_chunks", "kv_chunks") for chunk in body[name]]
    if any(start < 0 or step < 1 for start, _, step in chunks):
        return
    allowed = allowed_of(plan.problem)
    tables = [[range(*chunk) for chunk in body[name]] for name in ("q_chunks", "kv_chunks")]
    for task in body["tasks"]:
        if task[0] == "tile" and len(task[3]) > 1:
            rows, cols = (
                [at for chunk in piece[1] if chunk < len(table) for at in table[chunk] if at < most]
                for piece, table, most in zip(task[3], tables, allowed.shape, strict=False)
            )
            task[5] = int(allowed[rows][:, cols].sum())

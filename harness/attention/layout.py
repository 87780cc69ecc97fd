"""Who owns which tokens, as a strategy deals them."""

from dataclasses import replace

from harness.base.remembered import remembered
from harness.plan.problem import Direction, Problem
from harness.plan.sharding import Sharding
from harness.plan.tasks import Tensor
from harness.planning.chosen import Chosen
from harness.planning.strategy import Context
from harness.proved.plans import Owners


@remembered
def owners_of(chosen: Chosen, problem: Problem, context: Context) -> Owners:
    """Who owns which query and key tokens: whoever a forward plan starts with.

    The tokens are the same for attention and for a layer around it, but a layer's plan cuts queries
    and keys alike, so that its chunks may be finer.

    Raises:
        UnsupportedError: The strategy cannot do this problem.
    """
    queries, keys = Tensor.Q, Tensor.K
    if chosen.needs_layer or problem.hidden is not None:
        queries = keys = Tensor.X
        problem = replace(problem, hidden=problem.hidden or 1)
    plan = chosen.plan(problem, Direction.FORWARD, context)
    owned: dict[Tensor, list[dict[int, None]]] = {
        tensor: [{} for _ in range(problem.cp)] for tensor in (queries, keys)
    }
    for place, piece in plan.initial:
        if piece.tensor in owned:
            owned[piece.tensor][place.rank].update(dict.fromkeys(piece.chunks))
    return (
        Sharding(plan.q_chunks, tuple(map(tuple, owned[queries]))),
        Sharding(plan.kv_chunks, tuple(map(tuple, owned[keys]))),
    )

"""From a plan of attention to a plan of its whole layer, whatever the strategy.

The projections of q, k and v run before, where their tokens live; the output projection runs after,
where out ends. Backward begins with dout from dy and ends with what dq, dk and dv add to dx and to
the weights' gradients, of which every rank keeps the sum over its own tokens. Weights are there on
every rank. Forward also saves x, and out where it ended, for the gradients of the weights.

In between the plan is the strategy's own, task by task, so a strategy that knows nothing of layers
has them. One that treats projections as part of its algorithm writes its own plan instead.
"""

from collections.abc import Iterable, Iterator, Sequence

from harness.errors import UnsupportedError
from harness.plan import heads as head_sets
from harness.plan.dependencies import linked
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.tasks import (
    GATHERED,
    NO_CHUNKS,
    NO_HEADS,
    Collective,
    CollectiveKind,
    Finish,
    Leg,
    Linear,
    LinearOp,
    Merge,
    Piece,
    Place,
    Resident,
    Task,
    Tensor,
    from_rank,
)
from harness.planning.layers.cut_alike import cut_alike

WEIGHTS = (Tensor.W_Q, Tensor.W_K, Tensor.W_V, Tensor.W_O)
WEIGHT_GRADS = (Tensor.DW_Q_PART, Tensor.DW_K_PART, Tensor.DW_V_PART, Tensor.DW_O_PART)
_WEIGHT_OF = {
    Tensor.Q: Tensor.W_Q,
    Tensor.K: Tensor.W_K,
    Tensor.V: Tensor.W_V,
    Tensor.DQ: Tensor.W_Q,
    Tensor.DK: Tensor.W_K,
    Tensor.DV: Tensor.W_V,
}
_GRAD_OF = dict(zip(WEIGHTS, WEIGHT_GRADS, strict=True))
_TURNED = frozenset({Tensor.Q, Tensor.K, Tensor.DQ, Tensor.DK})


def check_layer(problem: Problem, name: str) -> None:
    """Refuse a problem that is no layer: its queries and keys come from the same tokens.

    Raises:
        UnsupportedError: Queries and keys differ in number.
    """
    if problem.seqlen_q != problem.seqlen_kv:
        raise UnsupportedError(
            f"{name}: a layer projects queries and keys from the same tokens; seqlen_kv "
            f"({problem.seqlen_kv}) must be seqlen_q ({problem.seqlen_q})",
            ("attention scope",),
        )


# One task each ------------------------------------------------------------------------------


def weight(problem: Problem, tensor: Tensor, heads: int | None = None) -> Piece:
    """Some heads of a weight or of its gradient; None = all."""
    if heads is None:
        every = problem.all_heads
        heads = problem.kv_heads(every) if tensor.on_kv else every
    return Piece(tensor, NO_CHUNKS, heads)


def tokens(tensor: Tensor, chunks: Sequence[int]) -> Piece:
    """Some tokens of x, y or one of their gradients."""
    return Piece(tensor, tuple(chunks), NO_HEADS)


def project(problem: Problem, rank: int, made: Piece) -> Linear:
    """Make some heads of q, k or v from x."""
    return Linear(
        Place(rank),
        LinearOp.PROJECT,
        (tokens(Tensor.X, made.chunks), weight(problem, _WEIGHT_OF[made.tensor], made.heads)),
        (made,),
        _turns(problem, made),
    )


def output(problem: Problem, rank: int, out: Piece) -> Linear:
    """Add some heads of out to y."""
    w_o = weight(problem, Tensor.W_O, out.heads)
    made = tokens(Tensor.Y_PART, out.chunks)
    return Linear(Place(rank), LinearOp.OUTPUT, (out, w_o), (made,))


def dout(problem: Problem, rank: int, made: Piece) -> Linear:
    """Make some heads of dout from dy."""
    w_o = weight(problem, Tensor.W_O, made.heads)
    return Linear(Place(rank), LinearOp.INPUT_GRAD, (tokens(Tensor.DY, made.chunks), w_o), (made,))


def output_weight_gradient(problem: Problem, rank: int, out: Piece) -> Linear:
    """Add what some heads of out give to the gradient of w_o."""
    grad = weight(problem, Tensor.DW_O_PART, out.heads)
    reads = (out, tokens(Tensor.DY, out.chunks))
    return Linear(Place(rank), LinearOp.WEIGHT_GRAD, reads, (grad,))


def into_x(problem: Problem, rank: int, grad: Piece) -> Iterator[Linear]:
    """Add some heads of dq, dk or dv to dx, and to the gradient of their weight."""
    place, turns = Place(rank), _turns(problem, grad)
    w = weight(problem, _WEIGHT_OF[grad.tensor], grad.heads)
    x, dx = (tokens(tensor, grad.chunks) for tensor in (Tensor.X, Tensor.DX_PART))
    dw = w._replace(tensor=_GRAD_OF[w.tensor])
    yield Linear(place, LinearOp.INPUT_GRAD, (grad, w), (dx,), turns)
    yield Linear(place, LinearOp.WEIGHT_GRAD, (x, grad), (dw,), turns)


def _turns(problem: Problem, piece: Piece) -> bool:
    return problem.rotary is not None and piece.tensor in _TURNED


def weights(problem: Problem, rank: int) -> Iterator[Resident]:
    """All weights at a rank."""
    for tensor in WEIGHTS:
        yield Resident(Place(rank), weight(problem, tensor))


# A whole plan -------------------------------------------------------------------------------


def as_layer(plan: Plan) -> Plan:
    """Plan the layer around a plan of attention.

    Raises:
        UnsupportedError: Its queries and keys are not the same tokens, or not owned alike.
    """
    check_layer(plan.problem, plan.strategy)
    plan = cut_alike(plan)
    around = _Forward(plan) if plan.direction is Direction.FORWARD else _Backward(plan)
    initial = tuple(around.initial())
    tasks = (*around.before(), *plan.tasks, *around.after())
    return Plan(
        problem=plan.problem,
        strategy=plan.strategy,
        direction=plan.direction,
        q_chunks=plan.q_chunks,
        kv_chunks=plan.kv_chunks,
        initial=initial,
        tasks=linked(initial, tasks),
        outputs=tuple(around.outputs()),
        saved=tuple(around.saved()),
    )


class _Around:
    """State that both directions share."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.problem = plan.problem
        self.ranks = range(plan.problem.cp)

    def of(self, residents: Iterable[Resident], *kinds: Tensor) -> list[Resident]:
        """Residents of some tensors, rank by rank."""
        found = [resident for resident in residents if resident.piece.tensor in kinds]
        return sorted(found, key=lambda resident: resident.place.rank)

    def start(self, token_kinds: tuple[Tensor, ...], owned: Sequence[Resident]) -> list[Resident]:
        """The weights, and x and dy of the tokens that a rank owns."""
        found: list[Resident] = []
        for rank in self.ranks:
            chunks = _chunks(owned, rank)
            if chunks:
                found += [Resident(Place(rank), tokens(t, chunks)) for t in token_kinds]
            found += weights(self.problem, rank)
        return found


class _Forward(_Around):
    """Projections before, output projection after."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.made = self.of(plan.initial, Tensor.Q, Tensor.K, Tensor.V)
        self.owned = self.of(plan.initial, Tensor.Q)
        for place, piece in self.made:
            if not set(piece.chunks) <= set(_chunks(self.owned, place.rank)):
                raise UnsupportedError(
                    f"{plan.strategy}: a layer's queries and keys must be owned alike; rank "
                    f"{place.rank} has {piece} without its queries"
                )

    def initial(self) -> list[Resident]:
        return self.start((Tensor.X,), self.owned)

    def before(self) -> Iterator[Task]:
        for place, piece in self.made:
            yield project(self.problem, place.rank, piece)

    def after(self) -> Iterator[Task]:
        outs = self.of(self.plan.outputs, Tensor.OUT)
        for rank in self.ranks:
            mine = [piece for place, piece in outs if place.rank == rank]
            yield from (output(self.problem, rank, piece) for piece in mine)
            chunks = _chunks(self.owned, rank)
            if chunks:
                yield Finish(Place(rank), (tokens(Tensor.Y_PART, chunks),))

    def outputs(self) -> Iterator[Resident]:
        for rank in self.ranks:
            chunks = _chunks(self.owned, rank)
            if chunks:
                yield Resident(Place(rank), tokens(Tensor.Y, chunks))

    def saved(self) -> Iterator[Resident]:
        yield from self.plan.saved
        kept = set(self.plan.saved)
        for resident in self.plan.outputs:
            if resident not in kept:
                yield resident
        for rank in self.ranks:
            chunks = _chunks(self.owned, rank)
            if chunks:
                yield Resident(Place(rank), tokens(Tensor.X, chunks))


class _Backward(_Around):
    """dout before, dx and the weights' gradients after."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self.made = self.of(plan.initial, Tensor.DOUT)
        held = set(plan.initial)
        # Out is where the forward plan left it: at hand as it is, or gathered beside.
        self.outs: list[Resident] = []
        self.beside: list[Resident] = []
        for place, piece in self.made:
            out = piece._replace(tensor=Tensor.OUT)
            if Resident(place, out) not in held:
                out = out._replace(version=GATHERED)
                self.beside.append(Resident(place, out))
            self.outs.append(Resident(place, out))

    def initial(self) -> Iterator[Resident]:
        yield from self.start((Tensor.X, Tensor.DY), self.made)
        yield from self.beside
        made = set(self.made)
        yield from (resident for resident in self.plan.initial if resident not in made)

    def before(self) -> Iterator[Task]:
        for (place, made), (_, out) in zip(self.made, self.outs, strict=True):
            yield dout(self.problem, place.rank, made)
            yield output_weight_gradient(self.problem, place.rank, out)

    def after(self) -> Iterator[Task]:
        grads = self.of(self.plan.outputs, Tensor.DQ, Tensor.DK, Tensor.DV)
        for rank in self.ranks:
            for place, piece in grads:
                if place.rank == rank:
                    yield from into_x(self.problem, rank, piece)
        for rank in self.ranks:
            chunks = _chunks(self.made, rank)
            if chunks:
                yield Finish(Place(rank), (tokens(Tensor.DX_PART, chunks),))

    def outputs(self) -> Iterator[Resident]:
        for rank in self.ranks:
            chunks = _chunks(self.made, rank)
            if chunks:
                yield Resident(Place(rank), tokens(Tensor.DX, chunks))
                yield from weight_gradients(self.problem, rank)

    def saved(self) -> tuple[Resident, ...]:
        return ()


def weight_gradients(problem: Problem, rank: int) -> Iterator[Resident]:
    """The sums over a rank's tokens that its weights' gradients end as."""
    for part in WEIGHT_GRADS:
        yield Resident(Place(rank), weight(problem, part))


def _chunks(owned: Sequence[Resident], rank: int) -> tuple[int, ...]:
    """Chunks of a rank's pieces, each once, in their order."""
    found = (c for place, piece in owned if place.rank == rank for c in piece.chunks)
    return tuple(dict.fromkeys(found))


# Sums over ranks ----------------------------------------------------------------------------


def with_summed_gradients(plan: Plan) -> Plan:
    """Add the reduction of the weights' gradients to a backward plan of a layer.

    Heads are dealt to ranks in order; each rank ends with the whole gradient of its heads, added in
    rank order, as a reduce-scatter leaves it.
    """
    problem = plan.problem
    initial, tasks = list(plan.initial), list(plan.tasks)
    kept = [r for r in plan.outputs if r.piece.tensor not in WEIGHT_GRADS]
    for part in WEIGHT_GRADS:
        held = (place.rank for place, piece in plan.outputs if piece.tensor is part)
        holders = tuple(dict.fromkeys(held))
        every = weight(problem, part).heads.bit_count()
        shares = [
            head_sets.span(rank * every // problem.cp, (rank + 1) * every // problem.cp)
            for rank in range(problem.cp)
        ]
        legs = tuple(
            Leg(Place(src), Place(dst), (weight(problem, part, share),), from_rank(src))
            for dst, share in enumerate(shares)
            for src in holders
            if share and src != dst
        )
        if legs:
            tasks.append(Collective(CollectiveKind.REDUCE_SCATTER, legs))
        for dst, share in enumerate(shares):
            if not share:
                continue
            own = weight(problem, part, share)
            arrived = tuple(own._replace(version=from_rank(s)) for s in holders if s != dst)
            if arrived:
                tasks.append(Merge(Place(dst), arrived))
            finish = Finish(Place(dst), (own,))
            tasks.append(finish)
            kept += [Resident(Place(dst), piece) for piece in finish.results]
    return Plan(
        problem=problem,
        strategy=plan.strategy,
        direction=plan.direction,
        q_chunks=plan.q_chunks,
        kv_chunks=plan.kv_chunks,
        initial=tuple(initial),
        tasks=linked(initial, tasks),
        outputs=tuple(kept),
    )

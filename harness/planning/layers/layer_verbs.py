"""The verbs of strategies that plan a whole layer: products at the token owner, heads in stages."""

from collections.abc import Iterable

from harness.errors import UnsupportedError
from harness.plan.problem import Direction, Problem
from harness.plan.tasks import NO_HEADS, Finish, Free, Leg, Memory, Piece, Place, Tensor, Transfer
from harness.planning.builder import PlanBuilder
from harness.planning.layers import layer


def only_layers(problem: Problem, name: str) -> None:
    """Refuse attention scope.

    Raises:
        UnsupportedError: The problem has no model width.
    """
    if problem.hidden is None:
        raise UnsupportedError(
            f"{name}: projections are part of it, so it plans whole layers, not attention alone",
            ("--scope layer",),
        )


def hold_layer(b: PlanBuilder, rank: int) -> None:
    """Start with x of the own tokens (backward also dy) and all weights."""
    own, place = b.queries.owned[rank], Place(rank)
    kinds = (Tensor.X,) if b.direction is Direction.FORWARD else (Tensor.X, Tensor.DY)
    for tensor in kinds:
        b.hold_piece(place, b.exact_piece(tensor, own, NO_HEADS))
    for _, piece in layer.weights(b.problem, rank):
        b.hold_piece(place, piece)


def add_projection(b: PlanBuilder, rank: int, piece: Piece) -> None:
    """Make heads of q, k or v of the own tokens from x."""
    if piece.chunks and piece.heads:
        b.add(layer.project(b.problem, rank, piece))


def add_output(b: PlanBuilder, rank: int, outs: Iterable[Piece]) -> None:
    """Add heads of out to y."""
    for out in outs:
        if out.chunks and out.heads:
            b.add(layer.output(b.problem, rank, out))


def finish_y(b: PlanBuilder, rank: int, chunks: tuple[int, ...]) -> None:
    """Finish y of tokens and promise it."""
    _finish_rows(b, rank, Tensor.Y_PART, Tensor.Y, chunks)


def start_gradients(b: PlanBuilder, rank: int, dout: Piece, outs: Iterable[Piece]) -> None:
    """Make dout from dy, and add what each part of out gives to the gradient of w_o."""
    if dout.chunks and dout.heads:
        b.add(layer.dout(b.problem, rank, dout))
    for out in outs:
        if out.chunks and out.heads:
            b.add(layer.output_weight_gradient(b.problem, rank, out))


def add_gradients(b: PlanBuilder, rank: int, grads: Iterable[Piece]) -> None:
    """Add heads of dq, dk or dv to dx and to their weights' gradients."""
    for grad in grads:
        if grad.chunks and grad.heads:
            for task in layer.into_x(b.problem, rank, grad):
                b.add(task)


def finish_x(b: PlanBuilder, rank: int, chunks: tuple[int, ...]) -> None:
    """Finish dx of tokens and promise it."""
    _finish_rows(b, rank, Tensor.DX_PART, Tensor.DX, chunks)


def output_weight_gradients(
    b: PlanBuilder, rank: int, query_sets: Iterable[int], kv_sets: Iterable[int]
) -> None:
    """Promise a rank's sums of the weights' gradients, in the sets of heads that they grew in.

    A rank without tokens has none.
    """
    if not b.tokens(Tensor.X, b.queries.owned[rank]):
        return
    by_kv, by_query = tuple(kv_sets), tuple(query_sets)
    for part in layer.WEIGHT_GRADS:
        for heads in by_kv if part.on_kv else by_query:
            b.output_piece(rank, layer.weight(b.problem, part, heads))


def offload(b: PlanBuilder, rank: int, pieces: Iterable[Piece]) -> None:
    """Copy pieces to the rank's host memory; partial results move there."""
    _copy(b, Place(rank), Place(rank, Memory.HOST), pieces)


def fetch(b: PlanBuilder, rank: int, pieces: Iterable[Piece]) -> None:
    """Copy pieces back from the rank's host memory; partial results move back."""
    _copy(b, Place(rank, Memory.HOST), Place(rank), pieces)


def _copy(b: PlanBuilder, src: Place, dst: Place, pieces: Iterable[Piece]) -> None:
    for piece in pieces:
        if piece.chunks and piece.heads:
            b.add(Transfer(Leg(src, dst, (piece,), piece.version)))


def release(b: PlanBuilder, rank: int, pieces: Iterable[Piece]) -> None:
    """Let pieces go from the device."""
    held = tuple(piece for piece in pieces if piece.chunks and piece.heads)
    if held:
        b.add(Free(Place(rank), held))


def _finish_rows(
    b: PlanBuilder, rank: int, part: Tensor, whole: Tensor, chunks: tuple[int, ...]
) -> None:
    piece = b.exact_piece(part, chunks, NO_HEADS)
    if piece.chunks:
        b.add(Finish(Place(rank), (piece,)))
        b.output_piece(rank, piece._replace(tensor=whole))

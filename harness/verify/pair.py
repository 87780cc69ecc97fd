"""Prove that a backward plan can follow its forward plan."""

from collections.abc import Iterator

from harness.errors import MisfitError
from harness.plan.plan import Plan
from harness.plan.residency import Residency
from harness.plan.tasks import Resident, Tensor

_STAYING = frozenset({Tensor.W_Q, Tensor.W_K, Tensor.W_V, Tensor.W_O})


def check_pair(forward: Plan, backward: Plan) -> None:
    """Prove that a backward plan starts from what its forward plan left, and the gradient.

    What lives there at the backward plan's start must be saved by the forward plan at the same
    place, or be the gradient of an output where that output ended (dout, or dy of a layer), or be
    a weight, which stays.

    Raises:
        MisfitError: They are for different problems or cut tokens differently.
        AbsentPieceError: The forward plan leaves less than the backward plan starts from.
    """
    for rule, first, second in (
        ("both directions plan one problem", forward.problem, backward.problem),
        ("both directions cut queries alike", forward.q_chunks, backward.q_chunks),
        ("both directions cut keys alike", forward.kv_chunks, backward.kv_chunks),
    ):
        if first != second:
            raise MisfitError(rule, rank=None, task=None, detail=f"{first} and {second}")
    left = Residency((*forward.saved, *_gradients(forward)))
    for place, piece in backward.initial:
        if piece.tensor not in _STAYING:
            left.resolve(place, piece, None)


def _gradients(forward: Plan) -> Iterator[Resident]:
    gradient = {Tensor.OUT: Tensor.DOUT, Tensor.Y: Tensor.DY}
    for place, piece in forward.outputs:
        if piece.tensor in gradient:
            yield Resident(place, piece._replace(tensor=gradient[piece.tensor], version=0))

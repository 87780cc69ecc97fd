"""Bytes and flops of everything in a plan: the one place that knows them."""

from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.plan.tasks import Leg, Linear, Piece, Place, Tensor, Tile, legs_of

_ACCUMULATED = frozenset(
    {Tensor.LSE, Tensor.DELTA} | {tensor for tensor in Tensor if tensor.is_part}
)
_PER_ROW = frozenset({Tensor.LSE, Tensor.LSE_PART, Tensor.DELTA})
_WIDE_V = frozenset(
    tensor
    for tensor in Tensor
    if tensor.value.removesuffix("_part")
    in ("v", "out", "dout", "dv", "w_v", "w_o", "dw_v", "dw_o")
)

_ROUNDED = frozenset({Tensor.DQ_PART, Tensor.DK_PART, Tensor.DV_PART})


def is_accumulated(tensor: Tensor) -> bool:
    """Whether a tensor is kept in accumulator precision."""
    return tensor in _ACCUMULATED


def is_per_row(tensor: Tensor) -> bool:
    """Whether a tensor has one element per token and head."""
    return tensor in _PER_ROW


def element_bytes(plan: Plan, tensor: Tensor) -> int:
    """Bytes per element of a tensor: accumulator precision for parts, lse and delta."""
    dtype = plan.problem.dtype
    return dtype.accumulator_bytes if tensor in _ACCUMULATED else dtype.bytes


def width(plan: Plan, tensor: Tensor) -> int:
    """Elements per token and head; of x and y per token, of a weight per head.

    Raises:
        ValueError: The tensor belongs to a layer, and the problem has no model width.
    """
    problem = plan.problem
    if tensor in _PER_ROW:
        return 1
    if tensor.is_headless:
        return problem.width
    head_dim = problem.head_dim_v if tensor in _WIDE_V else problem.head_dim
    return head_dim * problem.width if tensor.is_weight else head_dim


def batch_of(plan: Plan, tensor: Tensor) -> int:
    """How often a tensor is there: once per sequence, a weight once."""
    return 1 if tensor.is_weight else plan.problem.batch


def piece_bytes(plan: Plan, piece: Piece) -> int:
    """Bytes of a piece."""
    rows = batch_of(plan, piece.tensor) * piece.heads.bit_count() * plan.tokens(piece)
    return rows * width(plan, piece.tensor) * element_bytes(plan, piece.tensor)


def is_rounded(plan: Plan, tensor: Tensor) -> bool:
    """Whether a tensor crosses between ranks in another precision than it is kept in."""
    dtype = plan.problem.dtype
    narrow = dtype.bytes < dtype.accumulator_bytes
    return narrow and plan.problem.round_sent and tensor in _ROUNDED


def wire_bytes(plan: Plan, piece: Piece) -> int:
    """Bytes of a piece on its way between ranks."""
    size, dtype = piece_bytes(plan, piece), plan.problem.dtype
    if is_rounded(plan, piece.tensor):
        return size // dtype.accumulator_bytes * dtype.bytes
    return size


def leg_bytes(plan: Plan, leg: Leg) -> int:
    """Bytes that a leg moves between ranks or memories; 0 when both ends are one place."""
    if leg.src == leg.dst:
        return 0
    size = piece_bytes if leg.src.rank == leg.dst.rank else wire_bytes
    return sum(size(plan, piece) for piece in leg.pieces)


def sent_bytes(plan: Plan, leg: Leg) -> int:
    """Bytes that a leg sends to another rank; what goes to the own host and back is not sent."""
    return 0 if leg.src.rank == leg.dst.rank else leg_bytes(plan, leg)


def traffic(plan: Plan) -> tuple[list[int], list[int]]:
    """Bytes that each rank sends to other ranks, and bytes that it receives from them."""
    sent, received = ([0] * plan.problem.cp for _ in range(2))
    for task in plan.tasks:
        for leg in legs_of(task):
            size = sent_bytes(plan, leg)
            sent[leg.src.rank] += size
            received[leg.dst.rank] += size
    return sent, received


def tile_flops(plan: Plan, tile: Tile) -> int:
    """Floating-point operations of a tile, from its exact area.

    Forward 2 products, backward 5 (the scores again, dP, dV, dQ, dK): 2 flops per multiply-add.

    Source: FlashAttention-2 (arXiv:2307.08691, section 4.1): backward = 2.5 x forward.
    """
    problem = plan.problem
    pairs = tile.area * tile.heads.bit_count() * problem.batch
    d_k, d_v = problem.head_dim, problem.head_dim_v
    if tile.direction is Direction.FORWARD:
        return pairs * 2 * (d_k + d_v)
    return pairs * 2 * (3 * d_k + 2 * d_v)


def problem_flops(problem: Problem, direction: Direction) -> int:
    """Flops of all tiles of any plan of a problem: every unmasked pair is attended once."""
    whole = (Piece(Tensor.Q, (0,), problem.all_heads),)
    tile = Tile(Place(0), direction, whole, (), problem.pattern.total_area)
    return tile_flops(Plan(problem, "", direction, (), (), (), (tile,), ()), tile)


def linear_flops(plan: Plan, task: Linear) -> int:
    """Floating-point operations of a product: tokens x heads x head width x model width."""
    tokens = next(plan.tokens(p) for p in task.reads if not p.tensor.is_weight)
    headed = next(p for p in (*task.reads, *task.writes) if not p.tensor.is_headless)
    wide = any(p.tensor in _WIDE_V for p in (*task.reads, *task.writes))
    head_dim = plan.problem.head_dim_v if wide else plan.problem.head_dim
    rows = plan.problem.batch * tokens * headed.heads.bit_count()
    return 2 * rows * head_dim * plan.problem.width

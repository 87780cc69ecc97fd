"""Costs of assigning blocks to devices: work, and chunks needed, received and sent.

Per device, in chunks: A = rows (query chunks) that it needs and does not own, B = columns (key
chunks) likewise, C = its own rows needed elsewhere, D = its own columns needed elsewhere; a chunk
needed by two others counts twice in C or D. Then

    received = row_in A + column_in B + row_out C + column_out D
    sent     = row_out A + column_out B + row_in C + column_in D

A remote row costs its input (Q; Q and dO backward) on the way in and its partial result (O; dQ) on
the way back; a column its K and V, and backward dK and dV on the way back.

Source: UltraAttn (SC'25), Tables 2 and 3; the authors' code, `workload_partition.py:270-470`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

from harness.plan.problem import Direction, Problem

Matrix = tuple[tuple[int, ...], ...]
DeviceTable = Sequence[Sequence[int | None]]
Fixed = tuple[tuple[int, int, int], ...]  # (row, column, device) decided beforehand


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Price of moving a chunk, in whole units.

    Attributes:
        row_in: Input of a remote row: Q, or Q and dO.
        row_out: Result of a remote row: O, or dQ.
        column_in: Input of a remote column: K and V.
        column_out: Result of a remote column: nothing, or dK and dV.
        unit: Units per query chunk, the paper's 1.
    """

    row_in: int
    row_out: int
    column_in: int
    column_out: int
    unit: int = 1


FORWARD = Weights(row_in=1, row_out=1, column_in=2, column_out=0)
BACKWARD = Weights(row_in=2, row_out=1, column_in=2, column_out=2)


def weights_of(
    problem: Problem, direction: Direction, rows: int, columns: int, *, shipped: bool = False
) -> Weights:
    """Return the weights of a problem cut into `rows` query and `columns` key chunks.

    With equal lengths, heads and widths these are the paper's 1, 1, 2 (forward) and 2, 1, 2, 2.
    Fewer KV heads, other key lengths and other widths scale the columns.

    Args:
        problem: Shapes and precision.
        direction: Forward or backward.
        rows: Query chunks.
        columns: Key chunks.
        shipped: Count what the executor moves: partial results in accumulator precision, with the
            log-sum-exp (forward) or with it and delta on the way in (backward).
    """
    q_tokens, kv_tokens = problem.seqlen_q * columns, problem.seqlen_kv * rows
    d, d_v = problem.head_dim, problem.head_dim_v
    size = problem.dtype.bytes if shipped else 1
    part = problem.dtype.accumulator_bytes if shipped else 1
    per_row = part if shipped else 0
    row, column = q_tokens * problem.heads_q, kv_tokens * problem.heads_kv
    if direction is Direction.FORWARD:
        costs = (row * d * size, row * (d_v * part + per_row), column * (d + d_v) * size, 0)
    else:
        row_in = row * ((d + d_v) * size + 2 * per_row)
        costs = (row_in, row * d * part, column * (d + d_v) * size, column * (d + d_v) * part)
    unit = row * d * size
    common = gcd(unit, *costs)
    row_in, row_out, column_in, column_out = (cost // common for cost in costs)
    return Weights(
        row_in=row_in,
        row_out=row_out,
        column_in=column_in,
        column_out=column_out,
        unit=unit // common,
    )


def rounded(weights: Weights, steps: int = 4) -> Weights:
    """Return weights to the nearest of `steps` parts of a query chunk, in the fewest units.

    A log-sum-exp beside 128 numbers is no reason for another plan, and programs over small whole
    numbers are solved far faster. What moves stays what it was: at least a part.
    """

    def parts(price: int) -> int:
        return max(1, round(price * steps / weights.unit)) if price else 0

    prices = [
        parts(price)
        for price in (weights.row_in, weights.row_out, weights.column_in, weights.column_out)
    ]
    common = gcd(steps, *prices)
    row_in, row_out, column_in, column_out = (price // common for price in prices)
    return Weights(
        row_in=row_in,
        row_out=row_out,
        column_in=column_in,
        column_out=column_out,
        unit=steps // common,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One assignment problem: which device computes which block.

    Attributes:
        work: Per row, per column; 0 = an empty block that nobody computes.
        row_owner: Device that owns each row.
        column_owner: Device that owns each column.
        devices: How many.
        weights: Prices of chunks.
        cap: Most work of a device, in units of `work`.
        fixed: Blocks decided beforehand.
        inside: Traffic inside the device that computes a block, in weight units, added to what it
            receives and sends; () = none. The node level uses it for the links inside a node.
    """

    work: Matrix
    row_owner: tuple[int, ...]
    column_owner: tuple[int, ...]
    devices: int
    weights: Weights
    cap: int
    fixed: Fixed = ()
    inside: Matrix = ()

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """The (row, column) that hold work, row by row."""
        return [(i, j) for i, row in enumerate(self.work) for j, w in enumerate(row) if w]

    @property
    def total(self) -> int:
        """All work."""
        return sum(map(sum, self.work))

    def inside_of(self, row: int, column: int) -> int:
        """Traffic inside the device that computes this block."""
        return self.inside[row][column] if self.inside else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAccount:
    """The account of one device; the module's docstring defines A to D."""

    A: int
    B: int
    C: int
    D: int
    received: int
    sent: int
    work: int


def account(instance: Instance, cells: DeviceTable) -> tuple[DeviceAccount, ...]:
    """Return the work, needs and traffic of each device.

    Raises:
        ValueError: A block has no device, or an empty one has.
    """
    n, w = instance.devices, instance.weights
    rows: list[set[int]] = [set() for _ in range(n)]
    columns: list[set[int]] = [set() for _ in range(n)]
    work, inside = [0] * n, [0] * n
    for i, line in enumerate(instance.work):
        for j, size in enumerate(line):
            device = cells[i][j]
            if (device is None) != (size == 0):
                raise ValueError(f"block ({i}, {j}) has work {size} and device {device}")
            if device is not None:
                rows[device].add(i)
                columns[device].add(j)
                work[device] += size
                inside[device] += instance.inside_of(i, j)
    lent_rows, lent_columns = [0] * n, [0] * n
    remote_rows, remote_columns = [0] * n, [0] * n
    for device in range(n):
        for needed, owner, lent, remote in (
            (rows[device], instance.row_owner, lent_rows, remote_rows),
            (columns[device], instance.column_owner, lent_columns, remote_columns),
        ):
            for chunk in needed:
                if owner[chunk] != device:
                    lent[owner[chunk]] += 1
                    remote[device] += 1
    return tuple(
        DeviceAccount(
            A=a,
            B=b,
            C=c,
            D=d,
            received=w.row_in * a + w.column_in * b + w.row_out * c + w.column_out * d + x,
            sent=w.row_out * a + w.column_out * b + w.row_in * c + w.column_in * d + x,
            work=size,
        )
        for a, b, c, d, x, size in zip(
            remote_rows, remote_columns, lent_rows, lent_columns, inside, work, strict=True
        )
    )


def most(lines: Sequence[DeviceAccount]) -> int:
    """Return the largest amount that a device receives or sends: the paper's objective."""
    return max(max(line.received, line.sent) for line in lines)


def all_received(lines: Sequence[DeviceAccount]) -> int:
    """Return all that is received: the secondary objective."""
    return sum(line.received for line in lines)


def own_rows(instance: Instance) -> list[list[int | None]]:
    """Return the cells in which every block is computed by the owner of its row."""
    return [
        [owner if size else None for size in row]
        for owner, row in zip(instance.row_owner, instance.work, strict=True)
    ]


def even_owners(chunks: int, devices: int) -> tuple[int, ...]:
    """Return contiguous owners: chunk i belongs to device `i * devices // chunks`."""
    return tuple(i * devices // chunks for i in range(chunks))

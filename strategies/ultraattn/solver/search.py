"""Local search: many annealing chains at once, in numpy, towards a target for the maximum.

A chain is an assignment of every block. Its penalty is the squared excess of what each device
receives and sends over the target, and of its work over the cap. A move gives a block to another
device, or swaps the devices of two blocks. When a chain has no penalty, the target drops.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strategies.ultraattn.solver.instance import Instance, account, all_received, most

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Assignment = tuple[int, ...]  # device of each block, in the order of `Instance.blocks`

_CHAINS = 256
_ROUND = 2000  # steps from hot to cold; each round is twice as long
_LONGEST = 4000
_HOT, _COLD = 0.6, 0.15
_OVERLOAD = 0.85  # price of the squared excess of work, by half a block
_SWAPS = 0.5
_TRIES = 6
_NEAR = 0.7  # moves towards a device that already has the block's row or column
_SETTLED = 0.95  # moves towards a device that has any other block


@dataclass(frozen=True, slots=True)
class Tables:
    """An instance as arrays: what each need adds to (received, sent, work) of all devices."""

    row: Ints
    column: Ints
    size: Ints
    row_need: Floats  # (rows * devices, 3 * devices): device d needs row r
    column_need: Floats
    block_need: Floats  # (blocks * devices, 3 * devices): work and inside traffic
    free: Ints  # blocks that may move
    partners: list[Ints]  # per block, the blocks of its row or column

    @classmethod
    def of(cls, instance: Instance) -> "Tables":
        """Return the arrays of an instance."""
        n, w, blocks = instance.devices, instance.weights, instance.blocks
        row = np.array([i for i, _ in blocks], dtype=np.int64)
        column = np.array([j for _, j in blocks], dtype=np.int64)
        fixed = {(i, j) for i, j, _ in instance.fixed}
        block_need = np.zeros((len(blocks), n, 3 * n), dtype=np.float32)
        for b, (i, j) in enumerate(blocks):
            for d in range(n):
                inside = instance.inside_of(i, j)
                block_need[b, d, [d, n + d, 2 * n + d]] = inside, inside, instance.work[i][j]
        return cls(
            row=row,
            column=column,
            size=np.array([instance.work[i][j] for i, j in blocks], dtype=np.int64),
            row_need=_needs(instance.row_owner, n, w.row_in, w.row_out),
            column_need=_needs(instance.column_owner, n, w.column_in, w.column_out),
            block_need=block_need.reshape(-1, 3 * n),
            free=np.array([b for b, block in enumerate(blocks) if block not in fixed]),
            partners=[
                np.flatnonzero((row == i) | (column == j)) for i, j in zip(row, column, strict=True)
            ],
        )


def _needs(owners: Sequence[int], n: int, there: int, back: int) -> Floats:
    table = np.zeros((len(owners), n, 3 * n), dtype=np.float32)
    for chunk, owner in enumerate(owners):
        for d in range(n):
            if d != owner:
                table[chunk, d, [d, n + d, owner, n + owner]] = there, back, back, there
    return table.reshape(-1, 3 * n)


class Chains:
    """The state of all chains.

    Args:
        instance: The assignment problem.
        starts: Assignments, one a chain.
    """

    def __init__(self, instance: Instance, starts: NDArray[np.int64], seed: int) -> None:
        self.instance = instance
        self.tables = Tables.of(instance)
        self.n = instance.devices
        self.rows, self.columns = len(instance.row_owner), len(instance.column_owner)
        self.rng = np.random.default_rng(seed)
        self.place(starts)
        longest = max(map(len, self.tables.partners))
        self._partners = np.array([np.resize(p, longest) for p in self.tables.partners])

    def place(self, starts: NDArray[np.int64]) -> None:
        """Put every chain at its start."""
        t, n, m = self.tables, self.n, len(starts)
        self.device = starts.copy()
        self.chain = np.arange(m)
        lanes = self.chain[:, None]
        self.row_count = np.zeros((m, self.rows, n), dtype=np.int32)
        self.column_count = np.zeros((m, self.columns, n), dtype=np.int32)
        np.add.at(self.row_count, (lanes, t.row, starts), 1)
        np.add.at(self.column_count, (lanes, t.column, starts), 1)
        flow = (self.row_count > 0).reshape(m, -1).astype(np.float32) @ t.row_need
        flow += (self.column_count > 0).reshape(m, -1).astype(np.float32) @ t.column_need
        flow += t.block_need[np.arange(len(t.row)) * n + starts].sum(axis=1)
        self.flow = flow

    def step(self, limit: Floats, price: Floats, volume_price: float, heat: float) -> None:
        """Try one move in every chain at one temperature.

        `limit` and `price` are per (received, sent, work) of each device.
        """
        moves = self._moves(self.chain)
        before = self._penalty(self.flow, limit, price, volume_price)
        after = self._penalty(self.flow + moves.change, limit, price, volume_price)
        self._make(moves, np.flatnonzero(self._accepted(moves, after - before, heat)))

    def first(self, limit: Floats, price: Floats, heat: float, looks: int) -> int:
        """Look at many moves of the only chain, and make the first that is accepted.

        Returns:
            How many moves that took: `looks` when none was accepted.
        """
        moves = self._moves(np.zeros(looks, dtype=np.int64))
        before = self._penalty(self.flow, limit, price, 0.0)
        after = self._penalty(self.flow + moves.change, limit, price, 0.0)
        accepted = np.flatnonzero(self._accepted(moves, after - before, heat))[:1]
        self._make(moves, accepted)
        return int(accepted[0]) + 1 if len(accepted) else looks

    def resample(self, limit: Floats, price: Floats, volume_price: float, colder: float) -> None:
        """Let chains of low penalty go on in the place of others, as a colder heat would have it.

        Source: Hukushima and Iba, AIP Conference Proceedings 690, 2003: population annealing.

        Args:
            limit: As of `step`.
            price: As of `step`.
            volume_price: As of `step`.
            colder: By how much 1 / heat rises.
        """
        penalty = self._penalty(self.flow, limit, price, volume_price).astype(np.float64)
        share = np.cumsum(np.exp(-colder * (penalty - penalty.min())))
        count = len(penalty)
        places = (np.arange(count) + self.rng.random()) / count * share[-1]
        kept = np.minimum(np.searchsorted(share, places), count - 1)
        self.device, self.flow = self.device[kept], self.flow[kept]
        self.row_count, self.column_count = self.row_count[kept], self.column_count[kept]

    def _moves(self, chain: Ints) -> "Moves":
        """Draw a move for each place of `chain`, in the chain that stands there."""
        t, n, m, rng = self.tables, self.n, len(chain), self.rng
        random = rng.random((4, m))
        first = t.free[(random[0] * len(t.free)).astype(np.int64)]
        width = self._partners.shape[1]
        near = self._partners[first, (random[1] * width).astype(np.int64)]
        far = t.free[(random[1] * len(t.free)).astype(np.int64)]
        second = np.where(random[2] < _NEAR, near, far)
        old, new = self.device[chain, first], self.device[chain, second]
        wander = (random[2] > _SETTLED) | (old == new)
        new = np.where(wander, (rng.random(m) * n).astype(np.int64), new)
        # a block of the new device, if one of a few tries is one
        tries = t.free[(rng.random((_TRIES, m)) * len(t.free)).astype(np.int64)]
        match = (self.device[chain, tries] == new) & (tries != first)
        other = tries[match.argmax(axis=0), np.arange(m)]
        swap = match.any(axis=0) & (random[3] < _SWAPS) & (old != new)
        change = self._change(first, old, new, None, chain)
        idx = np.flatnonzero(swap)
        if len(idx):
            change[idx] += self._change(other[idx], new[idx], old[idx], first[idx], chain[idx])
        return Moves(chain, first, other, old, new, swap, change)

    def _accepted(self, moves: "Moves", gain: Floats, heat: float) -> NDArray[np.bool_]:
        """Return which moves the rule of Metropolis takes at a temperature."""
        accepted: NDArray[np.bool_] = gain <= -heat * np.log1p(-self.rng.random(len(gain)))
        accepted &= moves.old != moves.new
        return accepted

    def _make(self, moves: "Moves", made: Ints) -> None:
        """Make moves of different chains."""
        chain, old, new = moves.chain[made], moves.old[made], moves.new[made]
        self.flow[chain] += moves.change[made]
        self._shift(chain, moves.block[made], old, new)
        both = moves.swap[made]
        self._shift(chain[both], moves.other[made][both], new[both], old[both])

    def _penalty(self, flow: Floats, limit: Floats, price: Floats, volume_price: float) -> Floats:
        excess = np.maximum(flow - limit, 0)
        result: Floats = np.asarray((excess * excess) @ price, dtype=np.float32)
        if volume_price:
            result += np.float32(volume_price) * np.sum(flow[:, : self.n], axis=1)
        return result

    def _change(
        self, block: Ints, old: Ints, new: Ints, before: Ints | None, chain: Ints
    ) -> Floats:
        """Cost added by moving `block` from `old` to `new`, after `before` moved the other way."""
        t, n = self.tables, self.n
        result: Floats = t.block_need[block * n + new] - t.block_need[block * n + old]
        for line, counts, needs in (
            (t.row, self.row_count, t.row_need),
            (t.column, self.column_count, t.column_need),
        ):
            at = line[block]
            same = 0 if before is None else (line[before] == at).astype(np.int64)
            lost = counts[chain, at, old] + same == 1
            won = counts[chain, at, new] - same == 0
            result += needs[at * n + new] * won[:, None]
            result -= needs[at * n + old] * lost[:, None]
        return result

    def _shift(self, chain: Ints, block: Ints, old: Ints, new: Ints) -> None:
        t = self.tables
        self.device[chain, block] = new
        self.row_count[chain, t.row[block], old] -= 1
        self.row_count[chain, t.row[block], new] += 1
        self.column_count[chain, t.column[block], old] -= 1
        self.column_count[chain, t.column[block], new] += 1


@dataclass(frozen=True, slots=True)
class Moves:
    """Moves that are looked at: a block to another device, or for one of that device.

    Attributes:
        chain: Of which chain each is.
        block: That moves.
        other: That moves the other way, where `swap` says so.
        old: Device of `block`.
        new: Where `block` goes; the old device where nothing moves.
        swap: Whether two blocks change places.
        change: Gain of the chain's flow.
    """

    chain: Ints
    block: Ints
    other: Ints
    old: Ints
    new: Ints
    swap: NDArray[np.bool_]
    change: Floats


@dataclass(slots=True)
class BestAssignment:
    """The best assignment so far: least maximum, then least volume."""

    value: int
    volume: int
    devices: Assignment


def cells_of_blocks(instance: Instance, devices: Assignment) -> list[list[int | None]]:
    """Return the cells of an assignment of the blocks."""
    cells: list[list[int | None]] = [[None] * len(row) for row in instance.work]
    for (i, j), device in zip(instance.blocks, devices, strict=True):
        cells[i][j] = device
    return cells


def evaluated(instance: Instance, devices: Sequence[int]) -> BestAssignment | None:
    """Return an assignment with its value, or None where it breaks the cap or a fixed block."""
    cells = cells_of_blocks(instance, tuple(devices))
    lines = account(instance, cells)
    if any(line.work > instance.cap for line in lines):
        return None
    if any(cells[i][j] != device for i, j, device in instance.fixed):
        return None
    return BestAssignment(most(lines), all_received(lines), tuple(map(int, devices)))


def better(one: BestAssignment | None, other: BestAssignment | None) -> BestAssignment | None:
    """Return the better of two."""
    if one is None or other is None:
        return one or other
    return min(one, other, key=lambda best: (best.value, best.volume))


def starts(instance: Instance) -> list[Assignment]:
    """Return simple assignments: own rows, own columns, and every grid of row and column owners."""
    n, blocks = instance.devices, instance.blocks
    rows, columns = instance.row_owner, instance.column_owner
    plans = [
        [rows[i] for i, _ in blocks],
        [columns[j] for _, j in blocks],
    ]
    plans += [
        [rows[i] // x * x + columns[j] % x for i, j in blocks] for x in range(2, n) if n % x == 0
    ]
    plans += [
        [rows[i] % x + columns[j] // x * x for i, j in blocks] for x in range(2, n) if n % x == 0
    ]
    at = {block: index for index, block in enumerate(blocks)}
    for plan in plans:
        for i, j, device in instance.fixed:
            plan[at[i, j]] = device
    return [packed_assignment(instance), *dict.fromkeys(map(tuple, plans))]


def packed_assignment(instance: Instance) -> Assignment:
    """Return an assignment within the cap: fixed blocks, then the largest, each where it fits best.

    It fits whenever `blocks.instance_of` made the cap.
    """
    fixed = {(i, j): device for i, j, device in instance.fixed}
    loads = [0] * instance.devices
    for (i, j), device in fixed.items():
        loads[device] += instance.work[i][j]
    chosen = dict(fixed)
    free = [block for block in instance.blocks if block not in fixed]
    for i, j in sorted(free, key=lambda block: -instance.work[block[0]][block[1]]):
        work = instance.work[i][j]
        fits = [d for d in range(instance.devices) if loads[d] + work <= instance.cap]
        device = max(fits, key=lambda d: loads[d]) if fits else loads.index(min(loads))
        loads[device] += work
        chosen[i, j] = device
    return tuple(chosen[block] for block in instance.blocks)


def prices(instance: Instance) -> Floats:
    """Return the price of the squared excess of what each device receives, sends and computes."""
    flow = 1 / _unit(instance) ** 2
    half = max(1.0, max(map(max, instance.work)) / 2)  # an odd half block is a small matter
    return np.repeat([flow, flow, _OVERLOAD / half**2], instance.devices).astype(np.float32)


def flow_limits(instance: Instance, goal: int) -> Floats:
    """Return the most that each device is to receive, send and compute."""
    return np.repeat([goal, goal, instance.cap], instance.devices).astype(np.float32)


def _unit(instance: Instance) -> int:
    w = instance.weights
    return min(x for x in (w.row_in, w.row_out, w.column_in, w.column_out) if x)


class ManyChains:
    """Annealing that can be continued: each call of `run` spends some more seconds.

    Args:
        instance: The assignment problem.
        seed: Equal seeds give equal runs of equally many steps.
        given: More starts.
    """

    def __init__(
        self,
        instance: Instance,
        seed: int = 0,
        given: Sequence[Assignment] = (),
        chains: int = _CHAINS,
    ) -> None:
        self.instance = instance
        self.best: BestAssignment | None = None
        self.rng = np.random.default_rng(seed + 1)
        self._starts = [*given, *starts(instance)]
        for start in self._starts:
            self.best = better(self.best, evaluated(instance, start))
        self._length = _ROUND
        self._count = chains
        self.steps = 0
        self.chains = Chains(instance, self._fresh(), seed)

    def _fresh(self) -> NDArray[np.int64]:
        """Return starts for all chains: the simple ones and random ones, by turns."""
        n, blocks = self.instance.devices, len(self.instance.blocks)
        rows = [self._starts[k % len(self._starts)] for k in range(self._count)]
        result = np.array(rows, dtype=np.int64).reshape(self._count, blocks)
        random = (
            self.rng.random((self._count, blocks))
            < np.where(np.arange(self._count) % 2, 1.0, 0.1)[:, None]
        )
        result = np.where(random, self.rng.integers(n, size=result.shape), result)
        at = {block: index for index, block in enumerate(self.instance.blocks)}
        for i, j, device in self.instance.fixed:
            result[:, at[i, j]] = device
        return result

    def run(self, end: float, target: int, *, volume: int | None = None) -> None:
        """Anneal once, longer each time; stop when the maximum is at most `target`.

        Args:
            end: CPU time, as of `time.process_time`, at which to stop in any case.
            target: Lowest maximum worth reaching.
            volume: Keep the maximum at most `target` and lower the volume to this instead.
        """
        if not len(self.chains.tables.free) or self._done(target, volume):
            return
        price = prices(self.instance)
        volume_price = 0.0 if volume is None else 0.3 / _unit(self.instance)
        self.chains.place(self._fresh())
        for k in range(self._length):
            goal = target
            if volume is None and self.best is not None:
                goal = max(target, self.best.value - 1)
            limit = flow_limits(self.instance, goal)
            heat = _HOT * (_COLD / _HOT) ** (k / self._length)
            self.chains.step(limit, price, volume_price, heat)
            self.steps += 1
            if k % 16 == 0:
                self._keep(np.all(self.chains.flow <= limit, axis=1))
                if self._done(target, volume) or time.process_time() > end:
                    break
        self._length = min(self._length * 2, _LONGEST)

    def _done(self, target: int, volume: int | None) -> bool:
        best = self.best
        if best is None or best.value > target:
            return False
        return volume is None or best.volume <= volume

    def _keep(self, ready: NDArray[np.bool_]) -> None:
        if not ready.any():
            return
        n = self.instance.devices
        key = self.chains.flow[:, : 2 * n].max(axis=1) * 1e4 + self.chains.flow[:, :n].sum(axis=1)
        k = int(np.argmin(np.where(ready, key, np.inf)))
        self.best = better(self.best, evaluated(self.instance, self.chains.device[k].tolist()))

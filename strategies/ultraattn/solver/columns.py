"""Can the maximum be at most V? Answered with a partition of the blocks into one set per device.

Every set that a device can hold within the cap and within V is a column; a plan is one column per
device that together hold each block once. The linear relaxation, solved by column generation, is
far stronger than that of the block-wise program: its bound on the total volume alone often exceeds
devices x V, which is a proof. Otherwise columns whose reduced cost exceeds the difference cannot
be in any plan, and `branch` decides over the rest.
"""

import time
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import gcd

import numpy as np
from numpy.typing import NDArray

from strategies.ultraattn.solver.instance import Instance

Reals = NDArray[np.float64]
Ints = NDArray[np.int64]
Masks = NDArray[np.uint64]

MOST_BLOCKS = 64  # bits of a mask
_COLUMNS = 600_000  # more are not worth their linear program
_ADDED = 40  # columns per device and iteration
_CUTS = 60  # added at a time
_SMALL = 1500  # columns for which more cuts are not worth it
_SAFE = 1e-6


@dataclass(frozen=True, slots=True)
class DeviceSets:
    """All sets of blocks that some device can hold.

    Attributes:
        device: Of each set.
        mask: Its blocks, one bit each.
        cost: What it adds to the volume, in and out, of its remote rows and columns; and what
            nobody can use of its device's maximum, because others add whole steps.
        coefficient: (sets, blocks + 2 * devices): holds a block; adds to received and sent, what
            nobody can use included.
    """

    device: Ints
    mask: Masks
    cost: Reals
    coefficient: NDArray[np.float32]


def enumerate_columns(instance: Instance, most: int) -> DeviceSets | None:
    """Return every useful set, or None when there are too many or too many blocks."""
    if len(instance.blocks) > MOST_BLOCKS:
        return None
    parts = []
    count = 0
    for device in range(instance.devices):
        sets = _sets(instance, device, most)
        if sets is None:
            return None
        count += len(sets[0])
        if count > _COLUMNS:
            return None
        parts.append(_columns(instance, device, most, sets))
    return DeviceSets(
        device=np.concatenate([part.device for part in parts]),
        mask=np.concatenate([part.mask for part in parts]),
        cost=np.concatenate([part.cost for part in parts]),
        coefficient=np.concatenate([part.coefficient for part in parts]),
    )


def _sets(instance: Instance, device: int, most: int) -> tuple[Masks, Masks, Masks, Ints] | None:
    """Return masks of blocks, remote rows and remote columns, and inside traffic, of every set."""
    w, cap = instance.weights, instance.cap
    need = max(0, instance.total - (instance.devices - 1) * cap)
    fixed = {(i, j): d for i, j, d in instance.fixed}
    sizes = [instance.work[i][j] for i, j in instance.blocks]
    mask = rows = columns = np.zeros(1, dtype=np.uint64)
    load = inside = np.zeros(1, dtype=np.int64)
    rest = sum(sizes)
    for b, (i, j) in enumerate(instance.blocks):
        rest -= sizes[b]
        owner = fixed.get((i, j))
        row = np.uint64(0 if instance.row_owner[i] == device else 1 << i)
        column = np.uint64(0 if instance.column_owner[j] == device else 1 << j)
        taken = (
            mask | np.uint64(1 << b),
            rows | row,
            columns | column,
            load + sizes[b],
            inside + instance.inside_of(i, j),
        )
        a, c = np.bitwise_count(taken[1]).astype(np.int64), np.bitwise_count(taken[2])
        c = c.astype(np.int64)
        fits = (taken[3] <= cap) & (w.row_in * a + w.column_in * c + taken[4] <= most)
        fits &= w.row_out * a + w.column_out * c + taken[4] <= most
        if owner is not None and owner != device:
            fits[:] = False
        skipped = load + rest >= need
        fits &= taken[3] + rest >= need
        if owner == device:
            skipped[:] = False
        old = (mask, rows, columns, load, inside)
        mask, rows, columns, load, inside = (
            np.concatenate([before[skipped], after[fits]])
            for before, after in zip(old, taken, strict=True)
        )
        if len(mask) > _COLUMNS:
            return None
    return mask, rows, columns, inside


def _columns(
    instance: Instance, device: int, most: int, sets: tuple[Masks, Masks, Masks, Ints]
) -> DeviceSets:
    mask, rows, columns, inside = sets
    w, n, blocks = instance.weights, instance.devices, len(instance.blocks)
    matrix = np.zeros((len(mask), blocks + 2 * n), dtype=np.float32)
    for b in range(blocks):
        matrix[:, b] = (mask >> np.uint64(b)) & np.uint64(1)
    received, sent = matrix[:, blocks : blocks + n], matrix[:, blocks + n :]
    for bits, owners, there, back in (
        (rows, instance.row_owner, w.row_in, w.row_out),
        (columns, instance.column_owner, w.column_in, w.column_out),
    ):
        for chunk, owner in enumerate(owners):
            if owner != device:
                has = ((bits >> np.uint64(chunk)) & np.uint64(1)).astype(np.float32)
                received[:, device] += there * has
                sent[:, owner] += there * has
                received[:, owner] += back * has
                sent[:, device] += back * has
    received[:, device] += inside
    sent[:, device] += inside
    # The rest of `most` beside a set is useful in whole steps of other sets' weights only.
    steps = gcd(w.row_out, w.column_out) or 1, gcd(w.row_in, w.column_in) or 1
    for flow, step in zip((received, sent), steps, strict=True):
        flow[:, device] = most - (most - flow[:, device]) // step * step
    flow = received if steps[0] > steps[1] else sent  # both sums are the volume, but for the steps
    return DeviceSets(
        device=np.full(len(mask), device, dtype=np.int64),
        mask=mask,
        cost=flow.sum(axis=1, dtype=np.float64),
        coefficient=matrix,
    )


def refute(instance: Instance, most: int, end: float) -> bool:
    """Return whether linear programs alone prove that some device receives or sends more."""
    columns = enumerate_columns(instance, most)
    if columns is None:
        return False
    return relaxed(instance, columns, most, end) is None


def relaxed(instance: Instance, columns: DeviceSets, most: int, end: float) -> "Relaxation | None":
    """Return the relaxation with all cuts, or None when it refutes `most`."""
    if len(set(columns.device.tolist())) < instance.devices:
        return None
    relaxation = Relaxation(instance, columns, most)
    while True:
        relaxation.solve(end)
        if relaxation.refuted:
            return None
        if time.process_time() > end or len(relaxation.kept()) <= _SMALL or not relaxation.cut():
            return relaxation


class Relaxation:
    """The linear program over the columns: least volume of a fractional plan.

    Cuts: of three blocks, at most one set can hold two or more (subset-row inequalities).

    Source: Jepsen et al., Operations Research 56(2), 2008: subset-row inequalities.
    """

    def __init__(self, instance: Instance, columns: DeviceSets, most: int) -> None:
        from pyscipopt import LP

        self.n, self.blocks, self.most = instance.devices, len(instance.blocks), most
        self.columns = columns
        n, blocks = self.n, self.blocks
        self._lp = lp = LP()
        lp.addRows(
            [[] for _ in range(blocks + 3 * n)],
            [1.0] * blocks + [-lp.infinity()] * (2 * n) + [1.0] * n,
            [1.0] * blocks + [float(most)] * (2 * n) + [1.0] * n,
        )
        dear = 2.0 * n * most + 1  # price of a block or a device that goes without
        lp.addCols([[(b, 1.0)] for b in range(blocks)], [dear] * blocks)
        lp.addCols([[(blocks + 2 * n + d, 1.0)] for d in range(n)], [dear] * n)
        self._own_rows = blocks + 2 * n  # rows of the program: blocks, flows, own, cuts
        self._cut_rows = blocks + 3 * n
        self._offset = blocks + n  # columns of the program before the first set
        self._in_lp: list[int] = []
        self._open: list[bool] = []
        self._have = np.zeros(len(columns.device), dtype=bool)
        self._alive = np.ones(len(columns.device), dtype=bool)
        self._cuts: list[int] = []  # masks of three blocks
        self.bound = -np.inf
        self._view()

    @property
    def refuted(self) -> bool:
        """Whether no plan exists: even a fractional one moves more than devices x most."""
        return self.bound > self.n * self.most + _SAFE

    def kept(self) -> Ints:
        """Return the columns that a plan may use."""
        return np.flatnonzero(self._alive)

    def restrict(self, alive: NDArray[np.bool_]) -> None:
        """Allow only these columns from now on."""
        self._alive = alive.copy()
        self._view()
        self.bound = -np.inf
        for k in np.flatnonzero(alive[self._in_lp] != self._open).tolist():
            self._open[k] = not self._open[k]
            self._lp.chgBound(self._offset + k, 0.0, self._lp.infinity() if self._open[k] else 0.0)

    def _view(self) -> None:
        """Take the rows of the columns that may be used, to price these alone."""
        self._active = np.flatnonzero(self._alive)
        whole = len(self._active) == len(self._alive)
        coefficient = self.columns.coefficient
        self._matrix = coefficient if whole else coefficient[self._active]

    def solve(self, end: float) -> None:
        """Generate columns until the program is solved, refuted, or the time is over."""
        while True:
            self._lp.solve(dual=False)
            dual = self._dual()
            if np.count_nonzero(self._alive) < len(self._active) / 2:
                self._view()
            price = self._reduced_costs(dual)
            edges = np.searchsorted(self.columns.device[self._active], np.arange(self.n + 1))
            if not np.diff(edges).all():  # a device has no column left
                self.bound = np.inf
                return
            least = np.minimum.reduceat(price, edges[:-1])
            if not np.isfinite(least).all():
                self.bound = np.inf
                return
            self._tighten(dual, price, least)
            if self.refuted or time.process_time() > end:
                return
            if not self._add(self._attractive(dual, price), edges):
                return

    def _dual(self) -> Reals:
        """Return the dual values of all rows, those of inequalities at most 0."""
        base, convex = self._own_rows, self._cut_rows
        dual = np.array(self._lp.getDual())
        dual[self.blocks : base] = np.minimum(dual[self.blocks : base], 0.0)
        dual[convex:] = np.minimum(dual[convex:], 0.0)
        return dual

    def _reduced_costs(self, dual: Reals) -> Reals:
        """Return those of the active columns, but for what their device's own row is worth."""
        base, convex = self._own_rows, self._cut_rows
        mask = self.columns.mask[self._active]
        price: Reals = self.columns.cost[self._active] - self._matrix @ dual[:base]
        for k, cut in enumerate(self._cuts):
            if dual[convex + k]:
                price[np.bitwise_count(mask & np.uint64(cut)) > 1] -= dual[convex + k]
        price[~self._alive[self._active]] = np.inf
        return price

    def _tighten(self, dual: Reals, price: Reals, least: Reals) -> None:
        """Raise the bound to the Lagrangian one, and drop the columns that it rules out.

        Args:
            dual: See `_dual`.
            price: See `_reduced_costs`.
            least: The least of them per device.
        """
        base, convex = self._own_rows, self._cut_rows
        bound = dual[: self.blocks].sum() + self.most * dual[self.blocks : base].sum()
        bound += dual[convex:].sum() + least.sum()
        self.bound = max(self.bound, bound)
        above = price - least[self.columns.device[self._active]]
        self._alive[self._active[above > self.n * self.most - bound + _SAFE]] = False

    def _attractive(self, dual: Reals, price: Reals) -> Reals:
        """Return the whole reduced costs; 0 for columns that are there or may not be used."""
        base, convex = self._own_rows, self._cut_rows
        whole: Reals = price - dual[base:convex][self.columns.device[self._active]]
        whole[self._have[self._active] | ~self._alive[self._active]] = 0.0
        return whole

    def _add(self, price: Reals, edges: Ints) -> bool:
        """Add the cheapest columns of each device; return whether there was any."""
        parts = []
        for start, stop in pairwise(edges.tolist()):
            cheap = np.flatnonzero(price[start:stop] < -_SAFE)
            order = np.argsort(price[start:stop][cheap], kind="stable")[:_ADDED]
            parts.append(self._active[start:stop][cheap[order]])
        added = np.concatenate(parts).astype(np.int64)
        if not len(added):
            return False
        self._have[added] = True
        base, convex = self._own_rows, self._cut_rows
        entries = []
        for c in added.tolist():
            at = np.flatnonzero(self.columns.coefficient[c])
            entry = list(zip(at.tolist(), self.columns.coefficient[c, at].tolist(), strict=True))
            entry.append((base + int(self.columns.device[c]), 1.0))
            mask = int(self.columns.mask[c])
            entry += [
                (convex + k, 1.0)
                for k, cut in enumerate(self._cuts)
                if (mask & cut).bit_count() > 1
            ]
            entries.append(entry)
        self._lp.addCols(entries, self.columns.cost[added].tolist())
        self._in_lp += added.tolist()
        self._open += [True] * len(added)
        return True

    def used(self) -> tuple[Ints, Reals]:
        """Return the columns of the fractional plan, and how much of each."""
        value = np.array(self._lp.getPrimal())[self._offset :]
        at = np.flatnonzero(value > _SAFE)
        return np.array(self._in_lp, dtype=np.int64)[at], value[at]

    def cut(self) -> bool:
        """Add the most violated cuts; return whether there was any."""
        at, x = self.used()
        if not len(at):
            return False
        holds = self.columns.coefficient[at, : self.blocks].T > 0  # (blocks, used)
        i, j, k = np.array(list(combinations(range(self.blocks), 3))).T
        pairs = (holds[i] & holds[j]) | (holds[i] & holds[k]) | (holds[j] & holds[k])
        violation = pairs @ x - 1
        order = np.argsort(-violation, kind="stable")[:_CUTS]
        order = order[violation[order] > 0.02]
        if not len(order):
            return False
        masks = [1 << int(i[o]) | 1 << int(j[o]) | 1 << int(k[o]) for o in order]
        mine = [int(m) for m in self.columns.mask[np.array(self._in_lp)]]
        rows = [
            [(self._offset + c, 1.0) for c, mask in enumerate(mine) if (mask & cut).bit_count() > 1]
            for cut in masks
        ]
        self._lp.addRows(rows, [-self._lp.infinity()] * len(rows), [1.0] * len(rows))
        self._cuts += masks
        return True

"""One long annealing walk, for instances that are too large for many chains at once.

The penalty is the squared excess of what each device receives and sends over a target, and of its
work over the cap. A move gives a block to another device, with all blocks of its row or column
that are there, or swaps it with a block of that device. Half of the moves start at devices that are
over the target. What an accepted move changes are a few counts, so plain Python is fast enough.

Source of the moves at devices that are over: Seitz, Alava, Orponen, J. Stat. Mech. (2005) P06006,
focused Metropolis search.
"""

import time
from collections.abc import Iterator, Sequence
from math import exp
from random import Random

from strategies.ultraattn.account import Instance
from strategies.ultraattn.search import Assignment, Best, better, judged, starts

_HEATS = ((2.0, 0.3), (0.6, 0.15))  # from hot to cold, by turns: each finds what the other does not
_FIRST, _LONGEST = 20_000, 300_000  # moves of a round; each is twice as long as the one before
_OVERLOAD = 0.85  # price of the squared excess of work, by half a block
_FOCUS = 0.3  # moves that start at a device over the target
_LINES, _SWAPS = 0.1, 0.5  # moves of a row's or column's blocks together, and of two blocks
_TRIES = 8  # blocks looked at for one that is on a device
_CHECK = 256  # moves between looks at the clock


class State:
    """Who computes each block, and what that comes to.

    Attributes:
        device: Per block.
        received: Per device.
        sent: Per device.
        load: Per device.
        owners: Per block, of its row and of its column.
    """

    def __init__(self, instance: Instance, device: Sequence[int]) -> None:
        n, w = instance.devices, instance.weights
        self.prices = w.row_in, w.row_out, w.column_in, w.column_out
        self.owners = [
            (instance.row_owner[i], instance.column_owner[j]) for i, j in instance.blocks
        ]
        self.inside = [instance.inside_of(i, j) for i, j in instance.blocks]
        self.facts = [
            (i * n, j * n, *owners, instance.work[i][j])
            for (i, j), owners in zip(instance.blocks, self.owners, strict=True)
        ]
        self.rows = [0] * (len(instance.row_owner) * n)  # row * devices + device: its blocks there
        self.columns = [0] * (len(instance.column_owner) * n)
        self.device = list(device)
        self.received, self.sent, self.load = [0] * n, [0] * n, [0] * n
        for block, where in enumerate(device):
            self._enter(block, where)

    def move(self, block: int, old: int, new: int) -> None:
        """Give a block that a device has to another."""
        # Written out for rows and columns: nearly all of a search's time is spent here.
        row, column, row_owner, column_owner, work = self.facts[block]
        row_in, row_out, column_in, column_out = self.prices
        received, sent, counts = self.received, self.sent, self.rows
        left = counts[row + old] - 1
        counts[row + old] = left
        if not left and old != row_owner:
            received[old] -= row_in
            sent[old] -= row_out
            received[row_owner] -= row_out
            sent[row_owner] -= row_in
        counts = self.columns
        left = counts[column + old] - 1
        counts[column + old] = left
        if not left and old != column_owner:
            received[old] -= column_in
            sent[old] -= column_out
            received[column_owner] -= column_out
            sent[column_owner] -= column_in
        self.load[old] -= work
        inside = self.inside[block]
        if inside:
            received[old] -= inside
            sent[old] -= inside
        self._enter(block, new)

    def _enter(self, block: int, new: int) -> None:
        row, column, row_owner, column_owner, work = self.facts[block]
        row_in, row_out, column_in, column_out = self.prices
        received, sent, counts = self.received, self.sent, self.rows
        there = counts[row + new]
        counts[row + new] = there + 1
        if not there and new != row_owner:
            received[new] += row_in
            sent[new] += row_out
            received[row_owner] += row_out
            sent[row_owner] += row_in
        counts = self.columns
        there = counts[column + new]
        counts[column + new] = there + 1
        if not there and new != column_owner:
            received[new] += column_in
            sent[new] += column_out
            received[column_owner] += column_out
            sent[column_owner] += column_in
        self.load[new] += work
        inside = self.inside[block]
        if inside:
            received[new] += inside
            sent[new] += inside
        self.device[block] = new


class Walk:
    """A search that can be continued: each call of `run` spends some more seconds.

    Args:
        instance: What is assigned.
        seed: Equal seeds give equal walks.
        given: Assignments to start from, beside the simple ones.
    """

    def __init__(self, instance: Instance, seed: int = 0, given: Sequence[Assignment] = ()) -> None:
        self.instance = instance
        self.random = Random(seed)  # nothing secret: a fixed sequence
        self.best: Best | None = None
        self._starts = [*given, *starts(instance)]
        for start in self._starts:
            self.best = better(self.best, judged(instance, start))
        self._rounds = self._lengths()
        blocks = instance.blocks
        fixed = {(i, j) for i, j, _ in instance.fixed}
        self._free = [b for b, block in enumerate(blocks) if block not in fixed]
        self._lines = [
            [[c for c in self._free if blocks[c][line] == block[line]] for block in blocks]
            for line in (0, 1)
        ]
        self._owned = [
            [
                b
                for b in self._free
                if device in (instance.row_owner[blocks[b][0]], instance.column_owner[blocks[b][1]])
            ]
            for device in range(instance.devices)
        ]

    @staticmethod
    def _lengths() -> Iterator[tuple[int, float, float]]:
        length = _FIRST
        while True:
            for hot, cold in _HEATS:
                yield length, hot, cold
            length = min(2 * length, _LONGEST)

    def run(self, end: float, target: int) -> None:
        """Walk until the maximum is lower than it was, or the time is over.

        Args:
            end: CPU time, as of `time.process_time`, at which to stop.
            target: Lowest maximum that is of use.
        """
        best = self.best
        if not self._free or (best is not None and best.value <= target):
            return
        goal = target if best is None else max(target, best.value - 1)
        while time.process_time() < end:
            found = self._round(goal, end, *next(self._rounds))
            if found is not None:
                self.best = better(best, judged(self.instance, found))
                return

    def _start(self) -> list[int]:
        """Return one of the known assignments, or none of them: every block at random."""
        draw = self.random
        start = list(draw.choice(self._starts))
        if draw.random() < 0.5:
            for block in self._free:
                start[block] = draw.randrange(self.instance.devices)
        at = {block: index for index, block in enumerate(self.instance.blocks)}
        for i, j, device in self.instance.fixed:
            start[at[i, j]] = device
        return start

    def _round(
        self, goal: int, end: float, length: int, hot: float, cold: float
    ) -> list[int] | None:
        """Cool down once; return an assignment that keeps the goal and the cap."""
        instance, draw = self.instance, self.random.random
        state = State(instance, self._start())
        w = instance.weights
        unit = min(x for x in (w.row_in, w.row_out, w.column_in, w.column_out) if x)
        flow_price, load_price = 1 / unit**2, 4 * _OVERLOAD / max(map(max, instance.work)) ** 2
        received, sent, load, owners = state.received, state.sent, state.load, state.owners
        move, cap = state.move, instance.cap

        def penalty(device: int) -> float:
            over_in, over_out = received[device] - goal, sent[device] - goal
            over = load[device] - cap
            total = flow_price * over_in * over_in if over_in > 0 else 0.0
            if over_out > 0:
                total += flow_price * over_out * over_out
            return total + load_price * over * over if over > 0 else total

        penalties = [penalty(device) for device in range(instance.devices)]
        cool, heat = (cold / hot) ** (1 / length), hot
        for step in range(length):
            if step % _CHECK == 0:
                if not any(penalties):
                    return state.device
                if time.process_time() > end:
                    return None
            heat *= cool
            moves = self._moves(state, penalties)
            if not moves:
                continue
            touched = set(moves[0][1:])
            for block, old, new in moves:
                touched.update(owners[block])
                move(block, old, new)
            after = [penalty(device) for device in touched]
            gain = sum(after) - sum([penalties[device] for device in touched])
            if gain <= 0 or draw() < exp(-gain / heat):
                for device, value in zip(touched, after, strict=True):
                    penalties[device] = value
            else:
                for block, old, new in moves:
                    move(block, new, old)
        return None if any(penalties) else state.device

    def _moves(self, state: State, penalties: Sequence[float]) -> list[tuple[int, int, int]]:
        """Return (block, old device, new device) of one move; none where nothing would move."""
        draw, device, free = self.random.random, state.device, self._free
        block = free[int(draw() * len(free))]
        if draw() < _FOCUS:
            block = self._focused(state, penalties, block)
        old, kind = device[block], draw()
        if kind < 0.7:  # where some of its row or column already is
            line = self._lines[kind < 0.35][block]
            new = device[line[int(draw() * len(line))]]
        elif kind < 0.9:
            new = state.owners[block][kind < 0.8]
        else:
            new = int(draw() * len(penalties))
        if new == old:
            return []
        kind = draw()
        if kind < _LINES:
            line = self._lines[kind < _LINES / 2][block]
            return [(other, old, new) for other in line if device[other] == old]
        if kind < _LINES + _SWAPS:
            for _ in range(_TRIES):
                other = free[int(draw() * len(free))]
                if device[other] == new:
                    return [(block, old, new), (other, new, old)]
        return [(block, old, new)]

    def _focused(self, state: State, penalties: Sequence[float], block: int) -> int:
        """Return a block that a device over the target computes, or whose row or column it owns."""
        draw, n = self.random.random, len(penalties)
        where = int(draw() * n)
        for _ in range(n):
            if penalties[where]:
                break
            where = (where + 1) % n
        owned = self._owned[where]
        if owned and draw() < 0.5:
            return owned[int(draw() * len(owned))]
        for _ in range(2 * _TRIES):
            if state.device[block] == where:
                break
            block = self._free[int(draw() * len(self._free))]
        return block

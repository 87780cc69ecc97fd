"""Branch and price: a tree of restricted partitions, without the mirror images of a decision.

A node of the tree allows some columns. Its relaxation refutes it, or is whole and is a plan, or
some device needs a chunk by a fraction: then it does or it does not, and each case is a node. Where
devices are interchangeable, `it does not` stands for all equal devices and chunks at once, because
otherwise one that does could be renamed to be this one (orbital branching).

Source: Barnhart et al., Operations Research 46(3), 1998: branch and price; Ostrowski et al.,
Mathematical Programming 126, 2011: orbital branching.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from harness.schedule.scip import SolverStatus
from strategies.ultraattn.solver.columns import DeviceSets, Ints, Reals, enumerate_columns, relaxed
from strategies.ultraattn.solver.instance import Instance
from strategies.ultraattn.solver.search import Assignment

Bools = NDArray[np.bool_]
Renaming = tuple[int, ...]  # decision -> the decision that takes its place

_TRIED = 6  # decisions whose two cases are both solved before one is taken
_WHOLE = 1e-5
_RENAMINGS = 2000  # any set of them is valid; more are not worth their time


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether a plan exists: `status` INFEASIBLE is a proof; `devices` is a plan."""

    status: SolverStatus
    devices: Assignment | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """Allowed columns, and the decisions that led to them: needs that must and must not be."""

    alive: Bools
    must: frozenset[int] = frozenset()
    not_: frozenset[int] = frozenset()
    bound: float = 0.0
    renamings: tuple[Renaming, ...] = ()


def decide(instance: Instance, most: int, end: float) -> Decision | None:
    """Decide whether no device need receive or send more than `most`; None = too large for this.

    Args:
        instance: The assignment problem.
        most: The maximum asked for.
        end: CPU time, as of `time.process_time`, at which to give up.
    """
    columns = enumerate_columns(instance, most)
    return None if columns is None else Tree(instance, columns, most, end).run(end)


class Tree:
    """A search that can be continued: each call of `run` goes on where the last one stopped.

    Args:
        instance: The assignment problem.
        columns: Its columns at `most`.
        most: The maximum asked for.
        end: CPU time at which the first relaxation gives up.
    """

    def __init__(self, instance: Instance, columns: DeviceSets, most: int, end: float) -> None:
        self.instance, self.columns = instance, columns
        self.nodes = 0  # solved so far
        self._open: list[Node] = []
        relaxation = relaxed(instance, columns, most, end)
        if relaxation is None:
            return
        self._relaxation = relaxation
        self._lines = _lines(instance)
        masks = [(columns.mask & np.uint64(bits)) != 0 for bits in self._lines.values()]
        self._touches = np.array(masks)  # (lines, columns)
        self._of_device = [columns.device == d for d in range(instance.devices)]
        alive = np.zeros(len(columns.device), dtype=bool)
        alive[relaxation.kept()] = True
        self._open.append(Node(alive, renamings=tuple(renamings(instance, self._lines))))

    def run(self, end: float) -> Decision:
        """Go on until it is decided or the time is over."""
        while self._open:
            node = self._open.pop()
            found = self._expand(node, end)
            if found is None:  # out of time
                self._open.append(node)
                return Decision(SolverStatus.TIME_LIMIT)
            if isinstance(found, Decision):
                self._open.append(node)
                return found
            self._open += found
        return Decision(SolverStatus.INFEASIBLE)

    def _expand(self, node: Node, end: float) -> "Decision | list[Node] | None":
        solved = self._solve(node, end)
        if time.process_time() > end:
            return None
        if solved is None:
            return []
        self.nodes += 1
        node, used, amount = solved
        tries = self._fractional(used, amount)
        if not tries:
            return self._whole(node, used, amount)
        best: tuple[float, list[Node]] | None = None
        group = [g for g in node.renamings if _keeps(g, node.must) and _keeps(g, node.not_)]
        seen: set[int] = set()
        for need in tries:
            if need in seen:
                continue
            same = _orbit(group, need)
            seen |= same
            cases = [self._case(node, group, same, None), self._case(node, group, set(), need)]
            answers = [self._solve(case, end) for case in cases]
            if time.process_time() > end:
                return None
            kept = [answer[0] for answer in answers if answer is not None]
            if len(kept) < 2:
                return kept
            score = _score(node, kept)
            if best is None or score > best[0]:
                best = score, kept
        assert best is not None
        return best[1]

    def _solve(self, node: Node, end: float) -> tuple[Node, Ints, Reals] | None:
        """Return the node with its bound and the columns that remain, and its fractional plan."""
        self._relaxation.restrict(node.alive)
        self._relaxation.solve(end)
        if self._relaxation.refuted:
            return None
        alive = np.zeros(len(node.alive), dtype=bool)
        alive[self._relaxation.kept()] = True
        after = Node(alive, node.must, node.not_, self._relaxation.bound, node.renamings)
        return after, *self._relaxation.used()

    def _fractional(self, used: Ints, amount: Reals) -> list[int]:
        """Return needs, the most fractional first; need = line * devices + device."""
        n = self.instance.devices
        needs = np.zeros((len(self._lines), n))
        for d in range(n):
            mine = self.columns.device[used] == d
            needs[:, d] = self._touches[:, used[mine]] @ amount[mine]
        open_ = np.minimum(needs, 1 - needs).ravel()
        order = np.argsort(-open_, kind="stable")[:_TRIED]
        return [int(need) for need in order if open_[need] > _WHOLE]

    def _case(
        self, node: Node, group: Sequence[Renaming], not_: set[int], must: int | None
    ) -> Node:
        """Return the node in which one need must be, or several must not."""
        n = self.instance.devices
        alive = node.alive.copy()
        for need in not_:
            alive &= ~(self._of_device[need % n] & self._touches[need // n])
        if must is not None:
            alive &= ~self._of_device[must % n] | self._touches[must // n]
        musts = node.must if must is None else node.must | {must}
        return Node(alive, musts, node.not_ | not_, node.bound, tuple(group))

    def _whole(self, node: Node, used: Ints, amount: Reals) -> Decision | list[Node]:
        """Return the plan, or two nodes where a block is still shared by devices."""
        n, blocks = self.instance.devices, len(self.instance.blocks)
        holds = self.columns.coefficient[used, :blocks] > 0
        share = np.zeros((blocks, n))
        for d in range(n):
            mine = self.columns.device[used] == d
            share[:, d] = holds[mine].T @ amount[mine]
        open_ = np.minimum(share, 1 - share)
        if open_.max() <= _WHOLE:
            return Decision(SolverStatus.FEASIBLE, tuple(map(int, share.argmax(axis=1))))
        b, d = divmod(int(open_.argmax()), n)
        has = (self.columns.mask >> np.uint64(b)) & np.uint64(1) > 0
        return [
            Node(node.alive & ~(self._of_device[d] & has), bound=node.bound),
            Node(node.alive & (~self._of_device[d] | has), bound=node.bound),
        ]


def _score(node: Node, cases: Sequence[Node]) -> float:
    """Return how much a decision helps: the bounds that rise and the columns that go."""
    low, high = sorted(case.bound - node.bound for case in cases)
    before = node.alive.sum()
    gone = [np.log(before / case.alive.sum()) for case in cases]
    return float(low + 0.1 * high + 0.2 * gone[0] * gone[1])


def _lines(instance: Instance) -> dict[tuple[int, int], int]:
    """Return the blocks of each (0, row) and (1, column), one bit each."""
    found: dict[tuple[int, int], int] = {}
    for line in (0, 1):
        for chunk in sorted({block[line] for block in instance.blocks}):
            found[line, chunk] = sum(
                1 << b for b, block in enumerate(instance.blocks) if block[line] == chunk
            )
    return found


def _keeps(renaming: Renaming, needs: frozenset[int]) -> bool:
    return all(renaming[need] in needs for need in needs)


def _orbit(group: Sequence[Renaming], need: int) -> set[int]:
    found, todo = {need}, [need]
    while todo:
        at = todo.pop()
        new = {renaming[at] for renaming in group} - found
        found |= new
        todo += new
    return found


def renamings(instance: Instance, lines: dict[tuple[int, int], int]) -> Iterator[Renaming]:
    """Yield ways to rename devices and their chunks that leave the instance as it is.

    A chunk becomes the chunk at the same place of the other device.
    """
    n = instance.devices
    owners = (instance.row_owner, instance.column_owner)
    mine = [[[c for c, o in enumerate(own) if o == d] for d in range(n)] for own in owners]
    fixed = {(i, j): d for i, j, d in instance.fixed}
    index = {key: k for k, key in enumerate(lines)}

    def equal(d: int, e: int, to_d: int, to_e: int) -> bool:
        """Whether the blocks of d's rows and e's columns look like those of their images."""
        sides = ((mine[0][d], mine[0][to_d]), (mine[1][e], mine[1][to_e]))
        if any(len(a) != len(b) for a, b in sides):
            return False
        return all(
            instance.work[i][j] == instance.work[k][m]
            and instance.inside_of(i, j) == instance.inside_of(k, m)
            for (i, k), (j, m) in product(zip(*sides[0], strict=True), zip(*sides[1], strict=True))
        )

    def extended(to: list[int]) -> Iterator[list[int]]:
        d = len(to)
        if d == n:
            yield to
        for image in (e for e in range(n) if d < n and e not in to):
            new = [*to, image]
            if all(equal(d, e, image, new[e]) and equal(e, d, new[e], image) for e in range(d + 1)):
                yield from extended(new)

    for count, to in enumerate(extended([])):
        if count == _RENAMINGS:
            return
        place = [
            [mine[k][to[o]][mine[k][o].index(c)] for c, o in enumerate(own)]
            for k, own in enumerate(owners)
        ]
        if {(place[0][i], place[1][j]): to[d] for (i, j), d in fixed.items()} != fixed:
            continue
        image = [0] * (len(lines) * n)
        for (line, chunk), k in index.items():
            for d in range(n):
                image[k * n + d] = index[line, place[line][chunk]] * n + to[d]
        yield tuple(image)

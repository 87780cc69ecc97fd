"""The plan: who computes what and who sends what, as a frozen, hashable, printable value.

A plan names *pieces* (which tensor, which chunks, which heads) that live in *places* (a rank's
device or host memory) and *tasks* that read and write them. It holds no tensors and no times.
Tasks are stored in a topological order; a task's id is its position.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from harness.base.json_fields import json_text
from harness.plan.grid import grid
from harness.plan.problem import Direction, Problem, spelled
from harness.plan.tasks import (
    Collective,
    Delta,
    Finish,
    Free,
    Linear,
    Merge,
    Piece,
    Resident,
    Scope,
    Task,
    Tensor,
    Tile,
    Transfer,
)


@dataclass(frozen=True)
class Plan:
    """A whole plan for one direction of one problem.

    Attributes:
        problem: The problem.
        strategy: Name of the strategy, with its options, as a user would type it.
        direction: Forward or backward.
        q_chunks: Positions of each query chunk; together they cover the queries once.
        kv_chunks: As `q_chunks`, for keys.
        initial: Pieces and their places before the first task.
        tasks: In a topological order.
        outputs: Where the results must end, every (chunk, head) once.
        saved: Pieces that a forward plan leaves for its backward plan.
    """

    problem: Problem
    strategy: str
    direction: Direction
    q_chunks: tuple[range, ...]
    kv_chunks: tuple[range, ...]
    initial: tuple[Resident, ...]
    tasks: tuple[Task, ...]
    outputs: tuple[Resident, ...]
    saved: tuple[Resident, ...] = ()

    def chunks(self, piece: Piece) -> tuple[range, ...]:
        """Positions of each chunk of a piece; of a weight, one token that stands for none."""
        if piece.tensor.is_weight:
            return (range(1),) * len(piece.chunks)
        table = self.kv_chunks if piece.tensor.on_kv else self.q_chunks
        return tuple(table[chunk] for chunk in piece.chunks)

    def tokens(self, piece: Piece) -> int:
        """Tokens in a piece."""
        key = (piece.tensor, piece.chunks)
        found = self._tokens.get(key)
        if found is None:
            found = self._tokens[key] = sum(map(len, self.chunks(piece)))
        return found

    @cached_property
    def _tokens(self) -> dict[tuple[Tensor, tuple[int, ...]], int]:
        """Memo of `tokens`: every consumer asks for the same few pieces again."""
        return {}

    def rows(self, piece: Piece, chunks: Sequence[int]) -> tuple[int, int]:
        """Half-open rows that chunks side by side in a piece take in a tensor shaped as it.

        Raises:
            ValueError: Others of the piece lie between them, or they are not of it.
        """
        key = (piece.tensor, piece.chunks, tuple(chunks))
        found = self._rows.get(key)
        if found is None:
            at = piece.chunks.index(chunks[0])
            if piece.chunks[at : at + len(chunks)] != key[2]:
                raise ValueError(f"chunks {key[2]} are not side by side in {piece}")
            first = self.tokens(piece._replace(chunks=piece.chunks[:at]))
            found = (first, first + self.tokens(piece._replace(chunks=key[2])))
            self._rows[key] = found
        return found

    @cached_property
    def _rows(self) -> dict[tuple[Tensor, tuple[int, ...], tuple[int, ...]], tuple[int, int]]:
        """Memo of `rows`: each run of a plan asks for the same."""
        return {}

    @cached_property
    def scope(self) -> Scope:
        """Layer if x is there at the start, else attention."""
        layer = any(piece.tensor is Tensor.X for _, piece in self.initial)
        return Scope.LAYER if layer else Scope.ATTENTION

    @property
    def hash(self) -> str:
        """SHA-256 of the JSON form, 16 hex digits; equal plans have equal hashes."""
        return self._hashes[0]

    @property
    def work_hash(self) -> str:
        """The hash without the strategy's name: plans of several that do the same have the same."""
        return self._hashes[1]

    @cached_property
    def _hashes(self) -> tuple[str, str]:
        """`hash` and `work_hash`: the tasks, which are nearly all of the text, are written once."""
        nameless = to_json(replace(self, strategy=""))
        # A quote inside a string is escaped, so that this can be the key and nothing else.
        before, _, after = nameless.partition('"strategy":""')
        name = json_text(self.strategy, compact=True)
        texts = (f'{before}"strategy":{name}{after}', nameless)
        named, work = (hashlib.sha256(text.encode()).hexdigest()[:16] for text in texts)
        return named, work

    def __hash__(self) -> int:
        """Hash by content."""
        return int(self.hash, 16)

    def __str__(self) -> str:
        """Draw the rank x step grid."""
        return grid(self)


def _task_json(task: Task) -> list[object]:
    after = list(task.after)
    match task:
        case Tile():
            return ["tile", task.place, task.direction, task.reads, task.writes, task.area, after]
        case Transfer():
            return ["transfer", task.leg, after]
        case Collective():
            return ["collective", task.kind, task.legs, after]
        case Merge():
            return ["merge", task.place, task.sources, after]
        case Finish():
            return ["finish", task.place, task.parts, after]
        case Delta():
            return ["delta", task.place, task.out, task.dout, after]
        case Linear():
            return ["linear", task.place, task.op, task.reads, task.writes, task.rotary, after]
        case Free():
            return ["free", task.place, task.pieces, after]


def to_json(plan: Plan) -> str:
    """Write a plan as canonical JSON (stable order, no spaces)."""
    problem = plan.problem
    body = {
        "schema": 1,
        "problem": {
            **spelled(problem),
            **({"round_sent": True} if problem.round_sent else {}),
        },
        "strategy": plan.strategy,
        "direction": plan.direction,
        "q_chunks": [[c.start, c.stop, c.step] for c in plan.q_chunks],
        "kv_chunks": [[c.start, c.stop, c.step] for c in plan.kv_chunks],
        "initial": plan.initial,
        "tasks": [_task_json(task) for task in plan.tasks],
        "outputs": plan.outputs,
        "saved": plan.saved,
    }
    return json_text(body, compact=True, sort_keys=True)

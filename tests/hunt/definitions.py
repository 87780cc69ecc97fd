"""Masks by their definitions, a loop over positions each: nothing of `patterns` is used.

A pattern of blocks cuts `S` tokens at `i * S // blocks`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from random import Random

import numpy as np

Sees = Callable[[int, int], bool]
"""Whether a query sees a key, by their positions."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A pattern as it is typed, and who sees whom in it."""

    text: str
    sees: Sees

    def dense(self, queries: int, keys: int) -> np.ndarray:
        """Return the mask, shape `(queries, keys)`."""
        return np.array([[self.sees(q, k) for k in range(keys)] for q in range(queries)])


def cross(draw: Random, queries: int, keys: int) -> Drawn:
    """Draw a pattern that has a meaning where there are more keys than queries, or fewer."""
    left, right = draw.randrange(keys + 3), draw.randrange(4)
    shift = keys - queries
    return draw.choice(
        (
            Drawn("full", lambda _q, _k: True),
            Drawn("causal", lambda q, k: k <= q),
            Drawn("causal:align=bottom_right", lambda q, k: k <= q + shift),
            Drawn(f"window:left={left},right={right}", lambda q, k: q - left <= k <= q + right),
            Drawn(f"prefix_lm:length={left}", lambda q, k: k < left or k <= q),
            Drawn(
                f"lambda:sink={right},left={left}",
                lambda q, k: k <= q and (k < right or q - k <= left),
            ),
        )
    )


def packed(draw: Random, seqlen: int) -> Drawn:
    """Draw packed documents, with padding, windows or blocks."""
    kind = draw.randrange(3)
    padding = draw.randrange(seqlen // 3 + 1) if kind == 0 else 0
    lengths = _lengths(draw, seqlen - padding)
    document, inside = _documents(lengths, seqlen)
    listed = "+".join(map(str, lengths))
    if kind == 1:
        block = draw.randint(1, seqlen)
        return Drawn(
            f"varlen_block_causal:lengths={listed},block={block}",
            lambda q, k: document[q] == document[k] and inside[k] // block <= inside[q] // block,
        )
    window, causal = draw.randrange(seqlen), draw.random() < 0.7
    text = f"documents:lengths={listed},mask={'causal' if causal else 'full'}"
    if padding:
        text += f",padding={padding}"
    if kind == 2:
        text += f",window={window}"

    def sees(q: int, k: int) -> bool:
        same = document[q] == document[k] != -1
        near = kind != 2 or abs(q - k) <= window
        return same and near and (k <= q or not causal)

    return Drawn(text, sees)


def blocked(draw: Random, seqlen: int) -> Drawn:
    """Draw one of the block patterns."""
    blocks = draw.randint(2, min(12, seqlen))
    at = _block_of(seqlen, blocks)
    local = draw.randint(1, blocks)
    match draw.randrange(5):
        case 0:
            return Drawn(
                f"star:blocks={blocks}",
                lambda q, k: k <= q and (at[k] == 0 or at[k] == at[q]),
            )
        case 1:
            return Drawn(
                f"streaming:blocks={blocks},local={local}",
                lambda q, k: k <= q and (at[k] == 0 or at[q] - at[k] < local),
            )
        case 2:
            first = draw.randint(1, blocks)
            return Drawn(
                f"global_local:blocks={blocks},local={local},global={first}",
                lambda q, k: at[q] < first or at[k] < first or abs(at[q] - at[k]) < local,
            )
        case 3:
            stride = draw.randint(1, blocks)
            return Drawn(
                f"strided_original:blocks={blocks},stride={stride},local={local}",
                lambda q, k: (
                    at[q] % stride == at[k] % stride and abs(at[q] - at[k]) <= stride * (local - 1)
                ),
            )
        case _:
            return _shared_question(draw, seqlen)


def self_attention(draw: Random, seqlen: int) -> Drawn:
    """Draw any pattern."""
    kinds: Sequence[Callable[[], Drawn]] = (
        lambda: cross(draw, seqlen, seqlen),
        lambda: packed(draw, seqlen),
        lambda: blocked(draw, seqlen),
    )
    return draw.choice(kinds)()


def _shared_question(draw: Random, seqlen: int) -> Drawn:
    answers, percent = draw.randint(1, 5), draw.randrange(101)
    question = seqlen * percent // 100
    rest = seqlen - question
    starts = [question + i * rest // answers for i in range(answers)]

    def answer(position: int) -> int:
        return sum(position >= start for start in starts) if position >= question else 0

    return Drawn(
        f"shared_question:answers={answers},percent={percent}",
        lambda q, k: k <= q and answer(k) in (0, answer(q)),
    )


def _block_of(seqlen: int, blocks: int) -> list[int]:
    edges = [i * seqlen // blocks for i in range(1, blocks)]
    return [sum(position >= edge for edge in edges) for position in range(seqlen)]


def _lengths(draw: Random, seqlen: int) -> list[int]:
    count = draw.randint(1, min(6, seqlen))
    cuts = sorted(draw.sample(range(1, seqlen), count - 1))
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, seqlen], strict=True)]


def _documents(lengths: Sequence[int], seqlen: int) -> tuple[list[int], list[int]]:
    """Document of each position, -1 for padding, and its place inside the document."""
    document, inside = [-1] * seqlen, [0] * seqlen
    for number, (stop, length) in enumerate(zip(accumulate(lengths), lengths, strict=True)):
        for place in range(length):
            document[stop - length + place] = number
            inside[stop - length + place] = place
    return document, inside

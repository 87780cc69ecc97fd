"""Causal patterns whose first keys many queries see: prefix-LM, lambda, blockwise, one question.

    prefix_lm     lambda        causal_blockwise   shared_question
    1 1 . . .     1 . . . .     1 . . . . .        1 . . . .
    1 1 . . .     1 1 . . .     1 1 . . . .        1 1 . . .
    1 1 1 . .     1 1 1 . .     1 1 1 . . .        1 1 1 . .
    1 1 1 1 .     1 . 1 1 .     1 . 1 1 . .        1 1 . 1 .
    1 1 1 1 1     1 . . 1 1     1 1 1 1 1 .        1 1 . 1 1
                                1 1 1 1 1 1

Sources:
    prefix_lm: Raffel et al., T5 (arXiv:1910.10683, section 3.2.1, figure 4).
    lambda: Han et al., LM-Infinite (arXiv:2308.16137, section 4); Xiao et al., StreamingLLM
        (arXiv:2309.17453, section 3.2).
    causal_blockwise, shared_question, and the defaults of lambda: Jiang et al., DCP (SOSP'25,
        arXiv:2510.10620), the masks of the authors' code, `dcp/runtime/flash_attention/utils.py`.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from patterns.areas import Ints
from patterns.geometry import Band
from patterns.kind import BuiltMask, Kind, Values, whole_parameter
from patterns.pattern import Bools


@dataclass(frozen=True)
class PrefixAndBefore:
    """The first `length` keys are allowed, and those up to the query."""

    length: int

    def __call__(self, q: Ints, k: Ints) -> Bools:
        """Return the mask of query and key positions, broadcast together."""
        return np.asarray((k < self.length) | (k <= q))


@dataclass(frozen=True)
class SinkAndRecent:
    """Of the keys up to the query, the first `sink` and the last `left + 1` are allowed.

    Attributes:
        sink: First keys.
        left: Keys before the query's own.
        everything_from: From this query on, all keys up to the query are allowed.
    """

    sink: int
    left: int
    everything_from: int

    def __call__(self, q: Ints, k: Ints) -> Bools:
        """Return the mask of query and key positions, broadcast together."""
        seen = (k < self.sink) | (q - k <= self.left) | (q >= self.everything_from)
        return np.asarray((k <= q) & seen)


@dataclass(frozen=True, eq=False)
class SharedFirst:
    """Of the keys up to the query, those of part 0 and of the query's own part are allowed.

    Attributes:
        part: Part of every position, shape (seqlen,).
    """

    part: Ints

    def __call__(self, q: Ints, k: Ints) -> Bools:
        """Return the mask of query and key positions, broadcast together."""
        return np.asarray((k <= q) & ((self.part[k] == 0) | (self.part[k] == self.part[q])))


def _prefix_lm(values: Values, seqlen_q: int, seqlen_kv: int) -> BuiltMask:
    length = int(values["length"])
    inside = min(length, seqlen_kv)
    bands = [Band(q0=0, q1=seqlen_q, k0=0, k1=inside)] if inside else []
    if inside < min(seqlen_q, seqlen_kv):
        bands.append(Band(q0=inside, q1=seqlen_q, k0=inside, k1=seqlen_kv, lo=0))
    return BuiltMask(bands=tuple(bands), predicate=PrefixAndBefore(inside))


def _lambda(values: Values, seqlen_q: int, seqlen_kv: int) -> BuiltMask:
    # a window or a sink beyond the sequence is the whole sequence; so the numbers stay small
    sink = min(int(values["sink"]), seqlen_kv)
    left = min(int(values["left"]), seqlen_q - 1)
    bands = _sink_and_recent(sink, left, seqlen_q, seqlen_kv)
    return BuiltMask(bands=bands, predicate=SinkAndRecent(sink, left, seqlen_q))


def _sink_and_recent(sink: int, left: int, seqlen_q: int, seqlen_kv: int) -> tuple[Band, ...]:
    recent = Band(q0=0, q1=seqlen_q, k0=0, k1=seqlen_kv, lo=0, hi=left)
    if not sink or seqlen_q <= left + 1:
        return (recent,)
    return recent, Band(q0=left + 1, q1=seqlen_q, k0=0, k1=sink, lo=left + 1)


def _causal_blockwise(values: Values, seqlen: int, _: int) -> BuiltMask:
    block, local = int(values["block"]), int(values["local"])
    last = (seqlen - 1) // block * block  # where the last block starts
    left = min(local * block, seqlen - 1)
    bands = () if not last else _sink_and_recent(min(block, last), left, last, last)
    bands += (Band(q0=last, q1=seqlen, k0=0, k1=seqlen, lo=0),)
    return BuiltMask(bands=bands, predicate=SinkAndRecent(block, left, last))


def _shared_question(values: Values, seqlen: int, _: int) -> BuiltMask:
    answers, question = int(values["answers"]), seqlen * int(values["percent"]) // 100
    rest = seqlen - question
    edges = [question + i * rest // answers for i in range(answers + 1)]
    part = np.zeros(seqlen, dtype=np.int64)
    bands = [Band(q0=0, q1=seqlen, k0=0, k1=question, lo=0)] if question else []
    for number, (start, stop) in enumerate(pairwise(edges), start=1):
        part[start:stop] = number
        if start < stop:
            bands.append(Band(q0=start, q1=stop, k0=start, k1=stop, lo=0))
    return BuiltMask(bands=tuple(bands), predicate=SharedFirst(part))


PREFIX_LM = Kind(
    summary="a query sees the first `length` keys, and those up to its own position",
    build=_prefix_lm,
    parameters={"length": whole_parameter(1024, least=0)},
    sample=lambda seqlen: f"length={seqlen // 3}",
)
LAMBDA = Kind(
    summary="a query sees the first `sink` keys and `left` keys before its own position",
    build=_lambda,
    # 64 first tokens and a window of 4096, its own included: DCP's code, `lambda_mask_fn`
    parameters={"sink": whole_parameter(64, least=0), "left": whole_parameter(4095, least=0)},
    sample=lambda seqlen: f"sink={seqlen // 9},left={seqlen // 4}",
)
CAUSAL_BLOCKWISE = Kind(
    summary="examples in blocks: a query sees the first block and `local` blocks of tokens before "
    "its own; the last block sees all",
    build=_causal_blockwise,
    # blocks of 256 tokens, 2 of them local: DCP's code, `causal_blockwise_mask_fn`
    parameters={"block": whole_parameter(256, least=1), "local": whole_parameter(2, least=0)},
    cross=False,
    sample=lambda seqlen: f"block={seqlen // 7 + 1},local=1",
)
SHARED_QUESTION = Kind(
    summary="answers to one question: each sees the question and itself; the question is `percent` "
    "of the tokens",
    build=_shared_question,
    # a fifth of the tokens and 4 answers: DCP's code, `shared_question_mask_fn`
    parameters={
        "answers": whole_parameter(4, least=1, most=4096),
        "percent": whole_parameter(20, least=0, most=100),
    },
    cross=False,
    sample=lambda _: "answers=3,percent=30",
)

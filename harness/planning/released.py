"""What training with a strategy's released code is like, where that is not as planned here."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

from harness.plan.problem import Direction, Problem

O = TypeVar("O")  # noqa: E741  # the dataclass of a strategy's options


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What an implementation of attention holds beyond the values that the algorithm needs.

    Attributes: As those of the same names of `counting.Counting`.
    """

    held: bool = False
    wide_sums: bool = False
    results: bool = False
    scratch: bool = False
    rotary: bool = False
    loop: bool = False


LEAN = Holding(results=True, scratch=True)
"""Results of kernels and what kernels hold inside; sums as wide as values."""

PLAIN = replace(LEAN, wide_sums=True)
"""The same with float32 sums."""

RING_LOOP = replace(PLAIN, rotary=True, loop=True)
"""The loop of yunchang and ring-flash-attention, with a float32 rotary that makes copies.

Ulysses too runs it there, for a ring of one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Released(Generic[O]):
    """How released code runs a strategy.

    Attributes:
        holding: What it holds.
        options: What it does, as options here.
        extra_bytes: (problem, direction) -> bytes that each rank sends between nodes in one pass
            beyond the plan; None where it sends what is planned.
    """

    holding: Holding
    options: O
    extra_bytes: Callable[[Problem, Direction], float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(Generic[O]):
    """What the estimate of a training step asks of a strategy.

    Attributes:
        released: options -> how released code runs it; None where there is none.
        on_nodes: Number of nodes -> the options that it is trained with on so many.
        grows: The option that counts parts of a fixed length, where the strategy chooses it: the
            plan grows by the same with each, so plans of few parts tell what many take.
        note: What is to be said of its memory beside that of others.
    """

    released: Callable[[O], Released[O]] | None = None
    on_nodes: Callable[[int], O] | None = None
    grows: str | None = None
    note: str = ""


def ring_loop(options: O) -> Released[O]:
    """Released rings: their loop, which sends everything, needed or not."""
    sends_all: Any = options
    return Released(holding=RING_LOOP, options=replace(sends_all, prune=False))


def staged_loop(options: O) -> Released[O]:
    """Released stages of heads (untied-ulysses): no loop of a ring, and rotation in place.

    Over a ring of groups they take the loop as well, and each stage goes round by itself.
    """
    asked: Any = options
    if asked.ring == 1:
        return Released(holding=LEAN, options=options)
    extra = partial(_resent_bytes, asked.ring)
    return Released(holding=RING_LOOP, options=options, extra_bytes=extra)


def _resent_bytes(ring: int, problem: Problem, direction: Direction) -> float:
    """Count what a rank sends beyond need where each stage of heads goes round a ring by itself.

    Forward, that code passes queries around, backward keys with float32 dk and dv; a plan here
    passes the keys of a chunk around once for all stages that use them.
    """
    value, wide = problem.dtype.bytes, 4
    kv = max(problem.heads_kv, problem.cp // ring)
    again = problem.heads_q // kv - 1  # stages that use the same keys
    if direction is Direction.FORWARD:
        elements = max(0, (problem.heads_q - 2 * kv) * value * (ring - 1))
    else:
        elements = again * 2 * kv * (value * (ring - 1) + wide * ring)
    return problem.seqlen_q / problem.cp * problem.head_dim * elements

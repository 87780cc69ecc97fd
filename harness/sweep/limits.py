"""Limits of the cells of a sweep."""

from dataclasses import dataclass

WARMUP, ITERATIONS = 5, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a measured cell.

    Attributes:
        timeout_s: Seconds, planning included.
        memory_bytes: Resident memory of one rank.
        threads: Threads of one rank.
        warmup: Iterations that do not count.
        iterations: Iterations that do.
    """

    timeout_s: float = 120.0
    memory_bytes: int = 4 * 2**30
    threads: int = 1
    warmup: int = WARMUP
    iterations: int = ITERATIONS

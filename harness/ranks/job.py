"""A job on one rank: what it is told, what it answers, and how it can fail."""

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from harness.base.text import one_line, trace
from harness.base.workers import prints_to_stderr
from harness.errors import MeasurementError, told
from harness.ranks.wire import answer_type, pack, unpack, unpack_call


class Failure(StrEnum):
    """Reason why a job has no result."""

    ERROR = "error"
    TIMEOUT = "timeout"
    OOM = "oom"


class WorkerError(MeasurementError):
    """A job failed in a worker.

    Attributes:
        kind: Error, timeout or out of memory.
        rank: The worker, or None when it cannot be told.
        reason: Its error, a printable line.
        detail: The worker's traceback, or where each rank was when time ran out; printable.
    """

    def __init__(self, kind: Failure, rank: int | None, reason: str, detail: str = "") -> None:
        self.kind = kind
        self.rank = rank
        self.reason = one_line(reason)
        self.detail = trace(detail)
        super().__init__(self.reason if rank is None else f"rank {rank}: {self.reason}")


@dataclass(frozen=True, slots=True)
class Member:
    """A job's view of its team."""

    rank: int
    cp: int


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """Outcome of a job on one rank.

    Attributes:
        value: The result, as `wire` writes it.
        kind: How it failed; None if it did not.
        reason: Its error, a line.
        detail: Its traceback.
        at_s: When, seconds of the system's clock: the first failure is the cause of others.
    """

    value: bytes = b""
    kind: Failure | None = None
    reason: str = ""
    detail: str = ""
    at_s: float = field(default_factory=time.time)


def perform(job: Callable[..., object], member: Member, call: bytes) -> RankAnswer:
    """Do a job with arguments that came as bytes; what it prints goes to stderr."""
    try:
        with prints_to_stderr():
            value = job(member, **unpack_call(job, call))
    except Exception as error:  # the boundary of the process: the other side gets the text
        return failed(error)
    try:
        return RankAnswer(pack(answer_type(job), value))
    except Exception as error:  # as above
        return RankAnswer(
            kind=Failure.ERROR,
            reason=one_line(f"answer cannot be sent: {told(error)}"),
            detail=trace(traceback.format_exc()),
        )


def failed(error: Exception) -> RankAnswer:
    """The answer of a rank whose work raised."""
    return RankAnswer(
        kind=_kind(error),
        reason=one_line(told(error)),
        detail=trace(_trace(error)),
    )


def value_of(job: Callable[..., object], answer: RankAnswer) -> Any:  # noqa: ANN401  # any job's
    """Read the value that a job returned on one rank.

    Raises:
        ValueError: It is nothing that the job declares to return.
    """
    return unpack(answer_type(job), answer.value)


def _kind(error: Exception) -> Failure:
    if isinstance(error, MemoryError):
        return Failure.OOM
    text = told(error).lower()
    if "allocate memory" in text or "out of memory" in text:
        return Failure.OOM
    late = isinstance(error, RuntimeError) and ("timed out" in text or "timeout" in text)
    return Failure.TIMEOUT if late else Failure.ERROR


def _trace(error: Exception) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception as other:  # the text of some exceptions raises as well
        return f"no traceback: {type(other).__name__}"

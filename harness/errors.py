"""Every error that the harness raises on purpose.

HarnessError
├── UnsupportedError        a strategy or kernel cannot do this problem; says why and what is near
├── MeasurementError        a run failed for a reason that is not the plan's
├── RecordError             a record has a value that it cannot have (a ValueError, too)
├── DeviceProgramError      a device program is not safe, or does not do its plan
└── PlanError               a plan breaks a rule; names the rule, the rank and the task
    ├── MissedPairError         an unmasked (query, key, head) was never attended
    ├── RepeatedPairError       a (query, key, head) was attended more than once
    ├── MaskedPairError         a tile attends what the pattern masks, or declares a wrong area
    ├── MisfitError             the pieces of a task, or the tables of a plan, do not fit
    ├── AbsentPieceError        a task reads a piece that its place does not hold
    ├── UnorderedError          a task reads or overwrites a piece without an edge to its producer
    ├── OverwriteError          a piece arrives where the same piece already lives
    ├── LateContributionError   an accumulator grew after it had left its place
    ├── LostResultError         an output or gradient does not end at its owner exactly once
    └── CycleError              tasks wait for one another
"""


class HarnessError(Exception):
    """Root of the harness's own errors."""


def told(error: BaseException) -> str:
    """Message of an error for a user; an unexpected error is marked as internal, with its type."""
    try:
        text = str(error)
    except Exception as other:  # the error's own text may raise as well
        text = f"its text cannot be made, {type(other).__name__}"
    if isinstance(error, HarnessError | ValueError) and text.strip():
        return text
    return f"internal error, {type(error).__name__}: {text}"


class UnsupportedError(HarnessError):
    """A strategy or a kernel cannot do this problem.

    Args:
        reason: What, the value received, and the rule.
        nearest: Legal configurations close to the one asked for, as text.
    """

    def __init__(self, reason: str, nearest: tuple[str, ...] = ()) -> None:
        self.reason = reason
        self.nearest = nearest
        hint = f"; try {', '.join(nearest)}" if nearest else ""
        super().__init__(reason + hint)


class MeasurementError(HarnessError):
    """A run failed for a reason that is not the plan's (a dead worker, a timeout, memory)."""


class RecordError(HarnessError, ValueError):
    """A record lacks a field, or a field has a value that it cannot have; it is named."""


class DeviceProgramError(HarnessError):
    """A device program breaks a rule.

    Args:
        rule: The rule, as a sentence.
        rank: The rank where it breaks; None where several are at fault.
        operation: Number of the operation that breaks it; None where no single one does.
        detail: The finding.
    """

    def __init__(
        self, rule: str, *, rank: int | None, operation: int | None = None, detail: str = ""
    ) -> None:
        self.rule = rule
        self.rank = rank
        self.operation = operation
        self.detail = detail
        places = (("rank", rank), ("operation", operation))
        where = ", ".join(f"{what} {number}" for what, number in places if number is not None)
        super().__init__(f"{rule} ({where or 'whole program'}): {detail}")


class PlanError(HarnessError):
    """A plan breaks a rule.

    Args:
        rule: The rule, as a sentence.
        rank: The rank where it breaks; None when no single rank is at fault.
        task: Index of the task that breaks it; None when a task is missing.
        detail: The finding that breaks the rule.
    """

    def __init__(self, rule: str, *, rank: int | None, task: int | None, detail: str = "") -> None:
        self.rule = rule
        self.rank = rank
        self.task = task
        self.detail = detail
        where = ", ".join(
            part
            for part in (
                "" if rank is None else f"rank {rank}",
                "" if task is None else f"task {task}",
            )
            if part
        )
        super().__init__(f"{rule} ({where or 'whole plan'})" + (f": {detail}" if detail else ""))


class MissedPairError(PlanError):
    """An unmasked (query, key, head), or a head of a projection, is not in a result."""


class RepeatedPairError(PlanError):
    """A (query, key, head), or a head of a projection, is in a result more than once."""


class MaskedPairError(PlanError):
    """A tile attends what the pattern masks, or declares a wrong area."""


class MisfitError(PlanError):
    """The pieces of a task, or the tables of a plan, do not fit one another."""


class AbsentPieceError(PlanError):
    """A task reads a piece that its place does not hold."""


class UnorderedError(PlanError):
    """A task reads or overwrites a piece without an edge to its producer or readers."""


class OverwriteError(PlanError):
    """A piece arrives where the same piece already lives."""


class LateContributionError(PlanError):
    """An accumulator grew after it had left its place."""


class LostResultError(PlanError):
    """An output or gradient does not end at its owner exactly once."""


class CycleError(PlanError):
    """Tasks wait for one another."""

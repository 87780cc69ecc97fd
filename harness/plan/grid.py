"""A plan drawn as a rank x step grid, which errors can point into."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from harness.plan import heads as head_sets
from harness.plan.tasks import (
    Collective,
    Delta,
    Finish,
    Free,
    Linear,
    Merge,
    Piece,
    Task,
    Tile,
    Transfer,
    ranks_of,
)

if TYPE_CHECKING:  # a plan prints itself as its grid
    from harness.plan.plan import Plan


def label(task: Task) -> str:
    """One short cell of the grid for a task; for a wrong one too, as errors point into the grid."""
    match task:
        case Tile():
            return "·".join(f"{p.tensor.value}{_spans(p.chunks)}" for p in task.reads[:2])
        case Transfer():
            src, dst = task.leg.src, task.leg.dst
            return f"{_names(task.leg.pieces)}→{dst.memory if dst.rank == src.rank else dst.rank}"
        case Collective():
            moved = [piece for leg in task.legs for piece in leg.pieces]
            return f"{task.kind.value.replace('_', '-')} {_tensors(moved)}"
        case Merge():
            return f"+{_names(task.sources)}"
        case Finish():
            return "=" + ",".join(p.tensor.value.removesuffix("_part") for p in task.parts)
        case Delta():
            return "delta"
        case Linear():
            read = "·".join(piece.tensor.value for piece in task.reads)
            made = ",".join(piece.tensor.value for piece in task.writes)
            headed = [p for p in (*task.writes, *task.reads) if not p.tensor.is_headless]
            return f"{made}={read}" + "".join(f" h{head_sets.text(p.heads)}" for p in headed[:1])
        case Free():
            return f"free {_names(task.pieces)}"


def _names(pieces: Sequence[Piece]) -> str:
    return _tensors(pieces) + "".join(_spans(piece.chunks) for piece in pieces[:1])


def _spans(chunks: Sequence[int]) -> str:
    """Print chunks in their order, three and more in a row as `8-15`."""
    runs: list[list[int]] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][-1] + 1:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    long = 3
    return ",".join(
        f"{run[0]}-{run[-1]}" if len(run) >= long else ",".join(map(str, run)) for run in runs
    )


def _tensors(pieces: Sequence[Piece]) -> str:
    """`kv`, but `dk+dv`."""
    names = dict.fromkeys(piece.tensor.value.removesuffix("_part") for piece in pieces)
    return ("" if all(len(name) == 1 for name in names) else "+").join(names)


def steps_of(plan: "Plan") -> list[int]:
    """Step of every task: how many tiles its rank (a transfer's source) began before it."""
    seen: dict[int, int] = {}
    steps = []
    for task in plan.tasks:
        match task:
            case Tile():
                step = seen.get(task.place.rank, 0)
                seen[task.place.rank] = step + 1
            case Transfer():
                step = seen.get(task.leg.src.rank, 0)
            case Collective():
                step = max((seen.get(rank, 0) for rank in ranks_of(task)), default=0)
            case _:
                step = max(seen.get(task.place.rank, 0) - 1, 0)
        steps.append(step)
    return steps


def grid(plan: "Plan", mark: int | None = None, width: int = 22) -> str:
    """Draw a plan as rank x step; `mark` is the id of a task to point at.

    Each cell lists the tasks that a rank begins in a step: `k0→1` sends, `q0·k0` attends,
    `+dk` merges, `=out` finishes.

    Args:
        plan: The plan to draw.
        mark: The task to point at.
        width: Least columns of a step; what a step's longest cell takes, if that is more.
    """
    steps = steps_of(plan)
    cells: dict[tuple[int, int], list[str]] = {}
    for index, (task, step) in enumerate(zip(plan.tasks, steps, strict=True)):
        note = ">>" + label(task) + "<< ERROR" if index == mark else label(task)
        for rank in (task.leg.src.rank,) if isinstance(task, Transfer) else ranks_of(task):
            cells.setdefault((rank, step), []).append(note)
    last = max(steps, default=0)
    lines = [f"{plan.strategy} {plan.direction.value} cp={plan.problem.cp}"]
    widths = [width] * (last + 1)
    for (_, step), notes in cells.items():
        widths[step] = max(widths[step], *map(len, notes))
    heading = "rank " + " ".join(f"step {step}".ljust(w) for step, w in enumerate(widths))
    lines.append(heading.rstrip())
    for rank in range(plan.problem.cp):
        columns = [cells.get((rank, step), []) for step in range(last + 1)]
        for line in range(max(map(len, columns), default=0) or 1):
            head = f"{rank:>4} " if line == 0 else "     "
            texts = [(col[line] if line < len(col) else "") for col in columns]
            shown = " ".join(t.ljust(w) for t, w in zip(texts, widths, strict=True))
            lines.append((head + shown).rstrip())
    return "\n".join(lines)

"""Fit the kernel model of one GPU to its table of single kernels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.cluster.kernel_model import BackwardKernel, ForwardKernel, Kernels
from harness.fit.minimise import Reals, least_squares, robust
from harness.fit.tables import Row, halves
from harness.plan.problem import Direction

LEAST_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Error:
    """How well a fit does on rows that it has not seen.

    Attributes:
        n: Rows.
        mean: Mean absolute share of error.
        median: Median.
        largest: Largest.
    """

    n: int
    mean: float
    median: float
    largest: float

    def __str__(self) -> str:
        """In words, for who waits for a fit."""
        return (
            f"mean error {self.mean:.0%}, median {self.median:.0%}, largest {self.largest:.0%} "
            f"on {self.n} sizes that were not fitted"
        )

    @classmethod
    def of(cls, predicted: Reals, measured: Reals) -> "Error":
        """Compare."""
        gap = np.abs(predicted / measured - 1)
        return cls(len(gap), float(gap.mean()), float(np.median(gap)), float(gap.max()))


def fit_kernels(rows: Sequence[Row], like: Kernels) -> tuple[Kernels, dict[Direction, Error]]:
    """Fit both directions on half of the shapes.

    Args:
        rows: Of one GPU, with the columns of `kernel_times.csv`.
        like: Its datasheet values: SMs and memory.

    Returns:
        The model, and its error on the other half.
    """
    used = [row for row in rows if min(int(row["Sq"]), int(row["Skv"])) >= LEAST_TOKENS]
    used = [row for row in used if not _without_splits(row)]
    fit, report = halves(used, ("kernels",), map(_shape, used))
    guess = replace(
        like,
        forward=_forward([1e-5, _peak(used, "fwd_us", 4), 0.83, 1e-6, 0.9, 1e-6, 0.98, 20.0]),
        backward=_backward([1e-5, _peak(used, "bwd_us", 10), 1e-5, 6.0, 1.02, 20.0]),
    )
    first = [1e-5, guess.forward.flops_per_s, 0.83, 1e-6, 0.9, 1e-6, 0.98, 20.0]
    forward = _forward(_fitted(fit, "fwd_us", guess, first, Direction.FORWARD))
    first = [1e-5, guess.backward.flops_per_s, 1e-5, 6.0, 1.02, 20.0]
    backward = _backward(_fitted(fit, "bwd_us", guess, first, Direction.BACKWARD))
    model = _with(guess, forward, backward)
    errors = {
        direction: Error.of(kernel_seconds(model, report, direction), _measured(report, column))
        for direction, column in ((Direction.FORWARD, "fwd_us"), (Direction.BACKWARD, "bwd_us"))
    }
    return model, errors


def kernel_seconds(model: Kernels, rows: Sequence[Row], direction: Direction) -> Reals:
    """Predict rows of `kernel_times.csv`."""
    return np.array(
        [
            model.seconds(
                direction,
                int(row["Sq"]),
                int(row["Skv"]),
                int(row["heads"]),
                causal=row["causal"] == "1",
                head_dim=int(row["head_dim"]),
            )
            for row in rows
        ]
    )


def _fitted(
    rows: Sequence[Row], column: str, guess: Kernels, start: list[float], direction: Direction
) -> list[float]:
    measured = _measured(rows, column)
    forward = direction is Direction.FORWARD

    def residuals(x: Reals) -> Reals:
        model = _with(
            guess,
            _forward(x.tolist()) if forward else guess.forward,
            guess.backward if forward else _backward(x.tolist()),
        )
        return robust(np.log(kernel_seconds(model, rows, direction) / measured))

    found: list[float] = least_squares(residuals, start).tolist()
    return found


def _with(kernels: Kernels, forward: ForwardKernel, backward: BackwardKernel) -> Kernels:
    return replace(kernels, forward=forward, backward=backward)


def _forward(x: Sequence[float]) -> ForwardKernel:
    return ForwardKernel(
        launch_s=x[0],
        flops_per_s=x[1],
        alone=min(x[2], 1.0),
        block_s=x[3],
        split_efficiency=x[4],
        combine_s=x[5],
        causal=x[6],
        diagonal_keys=x[7],
        splits=True,
    )


def _backward(x: Sequence[float]) -> BackwardKernel:
    return BackwardKernel(
        launch_s=x[0],
        flops_per_s=x[1],
        block_s=x[2],
        passes=x[3],
        # The helper that computes delta reads out and dout in half precision, writes delta, and
        # clears the accumulator of dq: three passes or so. Tables of kernels do not tell which.
        delta_passes=min(3.0, x[3]),
        causal=x[4],
        diagonal_rows=x[5],
    )


def _measured(rows: Sequence[Row], column: str) -> Reals:
    return np.array([float(row[column]) * 1e-6 for row in rows])


def _peak(rows: Sequence[Row], column: str, flops: int) -> float:
    """The best rate of any full row."""
    full = [row for row in rows if row["causal"] == "0"]
    work = np.array([int(r["Sq"]) * int(r["Skv"]) * int(r["heads"]) * 128.0 * flops for r in full])
    return float((work / _measured(full, column)).max())


def _shape(row: Row) -> str:
    return "/".join(row[name] for name in ("Sq", "Skv", "heads", "causal"))


def _without_splits(row: Row) -> bool:
    """Whether a row was measured with an older kernel, which did not split keys.

    In the A100 table the full rows with one head and a ratio that is a power of two are.
    """
    ratio = int(row["Skv"]) / int(row["Sq"])
    old = row["gpu"] == "A100" and row["causal"] == "0" and row["heads"] == "1"
    return old and ratio in (0.25, 0.5, 1, 2, 4)

"""Two minimisers, small enough to read: damped least squares, and a simplex for what has kinks.

Parameters are positive and are searched by their logarithms, so that none needs a bound or a unit.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
_STEP = 1e-4  # of a logarithm, for differences
_LONGEST = 0.5  # of a logarithm, in one iteration
_TRIES = 12  # raisings of the damping before giving up


def robust(gaps: Reals, small: float = 0.03) -> Reals:
    """Make the squares of gaps grow no faster than the gaps, beyond small ones.

    So a few rows that a model cannot explain do not bend the others. Source: Huber (1964), The
    Annals of Mathematical Statistics 35:73.
    """
    size = np.abs(gaps)
    large = np.sqrt(np.maximum(2 * small * size - small**2, 0.0))
    return np.where(size > small, np.sign(gaps) * large, gaps)


def least_squares(
    residuals: Callable[[Reals], Reals], start: Sequence[float], iterations: int = 60
) -> Reals:
    """Minimise the sum of squared residuals by Levenberg's damped Gauss-Newton steps.

    Args:
        residuals: From parameters to differences, best of logarithms.
        start: Positive first guesses.
        iterations: At most.

    Source: Levenberg (1944), Quarterly of Applied Mathematics 2:164.
    """
    x = np.log(np.asarray(start, dtype=np.float64))
    here = residuals(np.exp(x))
    best, damping = float(here @ here), 1e-2
    for _ in range(iterations):
        columns = []
        for at in range(len(x)):
            moved = x.copy()
            moved[at] += _STEP
            columns.append((residuals(np.exp(moved)) - here) / _STEP)
        slope = np.stack(columns, axis=1)
        square, gradient = slope.T @ slope, slope.T @ here
        before = best
        for _ in range(_TRIES):
            ridge = damping * np.diag(np.diag(square) + 1e-9)
            step = np.clip(np.linalg.solve(square + ridge, -gradient), -_LONGEST, _LONGEST)
            there = residuals(np.exp(x + step))
            if float(there @ there) < best:
                x, here, best = x + step, there, float(there @ there)
                damping = max(damping / 3, 1e-7)
                break
            damping *= 4
        if before - best <= 1e-9 * before:
            break
    best_x: Reals = np.exp(x)
    return best_x


def simplex(
    loss: Callable[[Reals], float], start: Sequence[float], iterations: int, spread: float = 0.4
) -> Reals:
    """Minimise a loss with kinks, from a simplex whose corners differ by `spread` in logarithm.

    Source: Nelder & Mead (1965), The Computer Journal 7:308.
    """
    first = np.log(np.asarray(start, dtype=np.float64))
    points = [first, *(first + spread * row for row in np.eye(len(first)))]
    values = [loss(np.exp(point)) for point in points]
    for _ in range(iterations):
        order = np.argsort(values, kind="stable")
        points, values = [points[i] for i in order], [values[i] for i in order]
        middle = np.mean(points[:-1], axis=0)
        tries = [middle + factor * (middle - points[-1]) for factor in (1.0, 2.0, -0.5)]
        value = loss(np.exp(tries[0]))
        chosen, gain = tries[0], value
        if value < values[0]:
            far = loss(np.exp(tries[1]))
            if far < value:
                chosen, gain = tries[1], far
        elif value >= values[-2]:
            chosen, gain = tries[2], loss(np.exp(tries[2]))
        if gain < values[-1]:
            points[-1], values[-1] = chosen, gain
        else:
            points = [points[0], *(points[0] + 0.5 * (p - points[0]) for p in points[1:])]
            values = [values[0], *(loss(np.exp(point)) for point in points[1:])]
    best: Reals = np.exp(points[int(np.argmin(values))])
    return best

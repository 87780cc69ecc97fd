"""Fit latency, switch and bandwidth to a table of transfers."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from harness.cluster.link_model import Curve
from harness.fit.kernels import Error
from harness.fit.minimise import Reals, least_squares
from harness.fit.tables import Row

_SWITCH = (2**17, 2**23)  # bytes between which NCCL may switch its protocol


def fit_curve(seconds: Mapping[int, float]) -> tuple[Curve, Error]:
    """Fit one curve on every other size.

    Args:
        seconds: Per message size in bytes, the time of a message.

    Returns:
        The curve, and its error on the other sizes.
    """
    sizes = np.array(sorted(seconds), dtype=np.float64)
    times = np.array([seconds[int(size)] for size in sizes])
    odd = np.arange(len(sizes)) % 2 == 1
    rate = float(sizes[-1] / times[-1])
    middles = [b for _, b in pairwise(sizes[(sizes >= _SWITCH[0]) & (sizes <= _SWITCH[1])])]
    best: tuple[float, Curve] | None = None
    for switch in middles or [float(_SWITCH[0])]:

        def made(x: Reals, switch: float = switch) -> Curve:
            # Below the switch a message moves at no more than four times the large rate.
            return Curve(
                latency_s=float(x[0]),
                small_bytes_per_s=min(float(x[1]), 4 * rate),
                switch_bytes=float(switch),
                large_latency_s=float(x[2]),
                bytes_per_s=float(x[3]),
            )

        def residuals(x: Reals) -> Reals:
            curve = made(x)
            gaps: Reals = np.log([curve.seconds(n) for n in sizes[~odd]] / times[~odd])
            return gaps

        x = least_squares(residuals, [times[0], 0.7 * rate, times[0], rate], 30)
        loss = float(residuals(x) @ residuals(x))
        if best is None or loss < best[0]:
            best = (loss, made(x))
    assert best is not None  # there is a switch to try
    predicted = np.array([best[1].seconds(n) for n in sizes[odd]])
    return best[1], Error.of(predicted, times[odd])


def message_times(rows: Sequence[Row]) -> dict[int, float]:
    """Per size, the median time of one message in rows of `comm_bw.csv`."""
    found: dict[int, list[float]] = {}
    for row in rows:
        size = int(row["size_bytes"])
        found.setdefault(size, []).append(size / float(row["per_pair_GBps"]) / 1e9)
    return {size: float(np.median(times)) for size, times in found.items()}

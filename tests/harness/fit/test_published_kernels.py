"""Kernels by name, against the published speeds that they are fitted to."""

import pytest

from harness.cluster.calibration import calibration
from harness.cluster.kernel_choice import with_kernel
from harness.fit.published_kernels import fit_published, kernel_gaps, published_speeds
from harness.plan.problem import Direction

HAMMING = calibration("h100-hamming")


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", ["flash-attn-3", "cudnn"])
def test_a_kernel_reaches_its_published_speeds(name: str, direction: Direction) -> None:
    fitted = with_kernel(HAMMING, name)
    gaps = abs(kernel_gaps(fitted.kernels, direction, published_speeds(name, direction)))
    assert len(gaps) >= 6
    stated = fitted.errors[f"kernel_{direction.value}"]
    assert gaps.mean() == pytest.approx(stated, abs=2e-4)  # as the file rounds it
    assert gaps.max() < 0.13


def test_a_published_speed_is_a_time_by_its_source_s_flops() -> None:
    first = published_speeds("flash-attn-3", Direction.BACKWARD)[0]
    flops = 2.5 * 4 * 512**2 * 512 * 128
    assert (first.tokens, first.heads, first.causal) == (512, 512, False)
    assert first.seconds == pytest.approx(flops / 316e12)


@pytest.mark.parametrize("name", ["flash-attn-3", "cudnn"])
def test_fitting_again_gives_the_kernel_that_ships(name: str) -> None:
    again, ships = fit_published(name, HAMMING.kernels), with_kernel(HAMMING, name).kernels
    for direction in Direction:
        one, other = (
            kernels.seconds(direction, 6144, 3072, 7, causal=True) for kernels in (again, ships)
        )
        assert one == pytest.approx(other, rel=1e-3)

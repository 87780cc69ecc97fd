from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.cluster.kernel_model import BackwardKernel, ForwardKernel, Kernels
from harness.plan.problem import Direction

FORWARD, BACKWARD = Direction.FORWARD, Direction.BACKWARD
# 10 SMs; a block of 128 queries takes an SM 1 us per 64 keys, 128 keys 1 us per 64 queries.
RATE = 10 * 4 * 128 * 128 * 64 / 1e-6
KERNELS = Kernels(
    sms=10,
    block_rows=128,
    memory_bandwidth_bytes_per_s=1e15,
    uneven=1.0,
    forward=ForwardKernel(
        launch_s=0.0,
        flops_per_s=RATE,
        alone=0.8,
        block_s=0.0,
        split_efficiency=1.0,
        combine_s=0.0,
        causal=1.0,
        diagonal_keys=0.0,
        splits=False,
    ),
    backward=BackwardKernel(
        launch_s=0.0,
        flops_per_s=2.5 * RATE,
        block_s=0.0,
        passes=0.0,
        delta_passes=0.0,
        causal=1.0,
        diagonal_rows=0.0,
    ),
)


def us(direction: Direction, rows: int, columns: int, heads: int = 1, **more: object) -> float:
    return KERNELS.seconds(direction, rows, columns, heads, **more) * 1e6


def test_one_block_runs_alone_on_its_sm() -> None:
    assert us(FORWARD, 128, 640) == pytest.approx(10 / 0.8)


def test_a_full_wave_is_two_blocks_on_every_sm() -> None:
    assert us(FORWARD, 20 * 128, 640) == pytest.approx(20)
    assert us(FORWARD, 11 * 128, 640) == pytest.approx(20)  # one SM has two


def test_lengths_that_are_no_multiple_of_a_block_take_the_slower_kernel() -> None:
    slow = replace(KERNELS, uneven=1.25)
    for direction, rows, columns, factor in (
        (FORWARD, 384, 640, 1.0),
        (FORWARD, 383, 640, 1.25),
        (FORWARD, 384, 639, 1.25),
        (BACKWARD, 383, 639, 1.25),
    ):
        fast_s = KERNELS.seconds(direction, rows, columns, 3)
        assert slow.seconds(direction, rows, columns, 3) == pytest.approx(factor * fast_s)


def test_one_block_too_many_costs_another_wave() -> None:
    assert us(FORWARD, 21 * 128, 640) == pytest.approx(20 + 10 / 0.8)


def test_backward_with_few_blocks_is_linear_in_queries_and_free_in_keys() -> None:
    assert us(BACKWARD, 640, 128) == us(BACKWARD, 640, 1280) == pytest.approx(10)
    assert us(BACKWARD, 1280, 1280) == pytest.approx(20)
    assert us(BACKWARD, 640, 11 * 128) == pytest.approx(20)


def test_a_causal_mask_does_not_help_while_there_is_one_wave() -> None:
    assert us(BACKWARD, 1280, 1280, causal=True) == us(BACKWARD, 1280, 1280)
    assert us(FORWARD, 1280, 1280, causal=True) == pytest.approx(us(FORWARD, 1280, 1280))


def test_a_causal_mask_halves_the_time_of_many_blocks() -> None:
    for direction in Direction:
        full, half = (us(direction, 51200, 51200, 8, causal=c) for c in (False, True))
        assert 0.5 < half / full < 0.53


@pytest.mark.parametrize("direction", Direction)
def test_rows_below_a_triangle_meet_every_key(direction: Direction) -> None:
    """As `lower` makes calls: the diagonal begins in the first row and column."""
    triangle = us(direction, 25600, 25600, 8, causal=True)
    below = us(direction, 51200, 25600, 8)
    assert us(direction, 76800, 25600, 8, causal=True) == pytest.approx(triangle + below, rel=0.02)
    # flash-attn's ends in the last row and column: the rows above it meet no key.
    above = us(direction, 76800, 25600, 8, causal=True, ends_last=True)
    assert above == pytest.approx(triangle, rel=0.05)


def test_two_causal_blocks_on_an_sm_share_it_until_the_shorter_ends() -> None:
    kernels = replace(KERNELS, sms=1)
    # 2 us and 4 us of work: both at half speed until 4 us, the rest of 2 us alone at 0.8.
    time = kernels.seconds(FORWARD, 256, 256, 1, causal=True)
    assert time * 1e6 == pytest.approx((4 + 2 / 0.8) * RATE / RATE / 10)


def test_held_sms_lengthen_only_what_no_longer_fits() -> None:
    assert us(BACKWARD, 640, 8 * 128, held_sms=2) == us(BACKWARD, 640, 8 * 128)
    assert us(BACKWARD, 640, 10 * 128, held_sms=2) == 2 * us(BACKWARD, 640, 10 * 128)


def test_splitting_keys_fills_an_empty_gpu() -> None:
    split = replace(KERNELS, forward=replace(KERNELS.forward, splits=True))
    assert split.seconds(FORWARD, 128, 12800, 1) < KERNELS.seconds(FORWARD, 128, 12800, 1) / 4
    many = KERNELS.seconds(FORWARD, 12800, 1280, 4)
    assert split.seconds(FORWARD, 12800, 1280, 4) == many


def test_delta_that_is_given_saves_its_passes() -> None:
    backward = replace(KERNELS.backward, passes=6.0, delta_passes=3.0)
    kernels = replace(KERNELS, memory_bandwidth_bytes_per_s=1e9, backward=backward)
    saved = [kernels.seconds(BACKWARD, 128, 128, 1, delta_given=given) for given in (False, True)]
    assert saved[0] - saved[1] == pytest.approx(3 * 128 * 128 * 4 / 1e9)


def test_a_wave_is_named_only_where_blocks_fill_the_gpu() -> None:
    assert KERNELS.wave_s(FORWARD, 20 * 128, 640, 1) * 1e6 == pytest.approx(20)
    assert KERNELS.wave_s(FORWARD, 128, 640, 1) == 0.0
    assert KERNELS.wave_s(BACKWARD, 640, 20 * 128, 1) * 1e6 == pytest.approx(10)


def test_nothing_takes_no_time() -> None:
    assert us(FORWARD, 0, 128) == us(FORWARD, 128, 0) == us(FORWARD, 128, 128, density=0.0) == 0


@given(
    rows=st.integers(1, 4000),
    columns=st.integers(1, 4000),
    heads=st.integers(1, 64),
    held=st.integers(0, 9),
    causal=st.booleans(),
    direction=st.sampled_from(Direction),
)
def test_more_keys_or_fewer_sms_never_help_a_full_call(
    rows: int, columns: int, heads: int, held: int, causal: bool, direction: Direction
) -> None:
    time = us(direction, rows, columns, heads)
    assert us(direction, rows, columns + 256, heads) >= time > 0
    assert us(direction, rows, columns, heads, held_sms=held) >= time * (1 - 1e-9)
    if causal:
        square = us(direction, rows, rows, heads)
        assert us(direction, rows, rows, heads, causal=True) <= square * 1.3

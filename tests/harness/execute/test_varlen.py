"""Packed documents by varlen kernels, against the oracle and the path by masked blocks.

The kernels are those of the stand-in for flash-attn, so that signatures and segments are judged on
a CPU; no varlen kernel of a GPU has run.
"""

from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from harness.execute import kernels
from harness.execute.varlen import Lengths, VarlenKernel, packed_backward, packed_forward
from harness.execute.varlen_cuda import is_right, varlen_adapter
from harness.execute.varlen_segments import varlen_of
from harness.oracle.tolerance import calibrate, judge
from harness.peers.flash_attn_standin import standing_in
from harness.plan.masks import Mask, MaskKind
from patterns.areas import BandArrays
from patterns.geometry import Band
from tests.harness.execute.test_kernels import complain, tensors

SHAPES = [(2, 6, 2, 71, 83, 5, 5), (1, 4, 1, 83, 47, 24, 24)]


def drawn(rows: int, cols: int, step: int, seed: int) -> tuple[Mask, Tensor]:
    """Documents with random cuts, full or causal, some shifted so that rows see nothing."""
    draw = Random(seed)
    q, k = (range(3, 3 + step * rows, step), range(1, 1 + step * cols, step))
    q_cuts = sorted(draw.sample(range(2, 2 + step * rows), 9))
    k_cuts = sorted(draw.sample(range(0, step * cols), 9))
    bands = []
    for (q0, q1), (k0, k1) in zip(pairwise(q_cuts), pairwise(k_cuts), strict=True):
        lo = None if draw.random() < 0.4 else q0 - k0 + draw.randint(-9, 9)
        bands.append(Band(q0=q0, q1=q1, k0=k0, k1=k1, lo=lo))
    at_q, at_k = torch.tensor(q)[:, None], torch.tensor(k)[None]
    allowed = torch.zeros(rows, cols, dtype=torch.bool)
    for b in bands:
        inside = (b.q0 <= at_q) & (at_q < b.q1) & (b.k0 <= at_k) & (at_k < b.k1)
        allowed |= inside if b.lo is None else inside & (at_q - at_k >= b.lo)
    return Mask(MaskKind.PACKED, q, k, bands=BandArrays.of(bands)), allowed


def standin() -> VarlenKernel:
    with standing_in():
        return varlen_adapter("flash_attn.flash_attn_interface")


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("step", [1, 3])
def test_segments_cover_what_is_allowed_once_and_a_row_is_in_one_of_a_kind(
    step: int, seed: int
) -> None:
    mask, allowed = drawn(71, 53, step, seed)
    parts = varlen_of(mask)
    assert parts is not None
    covered = np.zeros(allowed.shape, dtype=int)
    for segments, causal in zip(parts, (True, False), strict=True):
        rows: list[int] = []
        for r0, r1, c0, c1 in zip(*segments, strict=True):
            size = (r1 - r0, c1 - c0)
            assert not causal or size[0] == size[1]
            covered[r0:r1, c0:c1] += np.tril(np.ones(size, int)) if causal else 1
            rows += range(r0, r1)
        assert len(rows) == len(set(rows))
    assert np.array_equal(covered, allowed.numpy())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_directions_equal_the_oracle(
    shape: tuple[int, int, int, int, int, int, int],
) -> None:
    q, k, v, dout = tensors(shape, torch.float32)
    mask, allowed = drawn(shape[3], shape[4], 1, 5)
    assert not allowed.any(-1).all()  # some rows see nothing
    tolerance = calibrate(q, k, v, allowed, scale=0.2, dout=dout)
    found = packed_forward(standin(), kernels.merge_, q, k, v, mask, 0.2)
    assert found is not None
    out, lse = found
    six = (dout, q, k, v, out, lse.masked_fill(lse == -torch.inf, torch.inf))
    grads = packed_backward(standin(), six, mask, 0.2)
    assert grads is not None
    result = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    assert not complain(judge(result, tolerance))


def test_windows_and_other_steps_are_left_to_masked_blocks() -> None:
    mask, _ = drawn(20, 30, 1, 1)
    other = Mask(MaskKind.PACKED, mask.q, range(1, 61, 2), bands=mask.bands)
    assert varlen_of(other) is None
    window = BandArrays.of([Band(q0=3, q1=9, k0=1, k1=9, lo=0, hi=3)])
    assert varlen_of(Mask(MaskKind.PACKED, mask.q, mask.k, bands=window)) is None


def test_a_kernel_that_attends_otherwise_is_not_relied_on() -> None:
    kernel, cpu = standin(), torch.device("cpu")
    assert is_right(kernel, cpu)

    def never_causal(
        q: Tensor, k: Tensor, v: Tensor, at: Lengths, *, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        del causal
        return kernel.forward(q, k, v, at, causal=False, scale=scale)

    assert not is_right(VarlenKernel(never_causal, kernel.backward), cpu)


def test_packed_calls_on_a_card_go_to_the_kernel_in_both_directions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v, dout = tensors(SHAPES[1], torch.float32)
    mask, _ = drawn(SHAPES[1][3], SHAPES[1][4], 1, 5)
    called: list[str] = []

    def counted(name: str) -> VarlenKernel:
        called.append(name)
        return standin()

    blocks = kernels.attend_call(q, k, v, mask, 0.2)
    monkeypatch.setattr(kernels, "varlen_kernel", lambda _: counted("found"))
    out, lse = kernels.attend_call(q, k, v, mask, 0.2)
    kernels.attend_backward(dout, q, k, v, out, lse, mask, 0.2)
    assert called == ["found", "found"]
    torch.testing.assert_close((out, lse), blocks)

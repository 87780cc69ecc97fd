"""Kernel calls against the oracle, and each trap of the kernels beneath, by name."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.errors import UnsupportedError
from harness.execute import kernels, kernels_cuda
from harness.execute.kernels import (
    Mask,
    MaskKind,
    accumulator_dtype,
    add,
    attend_backward,
    attend_backward_delta,
    attend_call,
    delta,
    merge_,
)
from harness.oracle.dense import reference
from harness.oracle.tolerance import Verdict, calibrate, judge
from harness.plan.row_blocks import batches, parts
from patterns import Band
from patterns.areas import BandArrays

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LOW = (torch.bfloat16, torch.float16)
KINDS = tuple(MaskKind)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tensors(
    shape: tuple[int, int, int, int, int, int, int], dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout of a shape (B, H, G, S, T, D, E)."""
    batch, heads, heads_kv, rows, cols, dim, dim_v = shape
    rng = torch.Generator().manual_seed(seed)
    sizes = (
        (batch, heads, rows, dim),
        (batch, heads_kv, cols, dim),
        (batch, heads_kv, cols, dim_v),
        (batch, heads, rows, dim_v),
    )
    q, k, v, dout = (torch.randn(s, generator=rng, dtype=torch.float64).to(dtype) for s in sizes)
    return q, k, v, dout


def mask_of(kind: MaskKind, rows: int, cols: int) -> tuple[Mask, Tensor]:
    """A mask of every kind, and its table. The band empties some rows and has strided keys."""
    q, k = range(1, 1 + rows), range(3, 3 + 2 * cols, 2)
    distance = torch.tensor(q)[:, None] - torch.tensor(k)[None, :]
    match kind:
        case MaskKind.FULL:
            return Mask(kind, q, k), torch.ones_like(distance, dtype=torch.bool)
        case MaskKind.CAUSAL:
            return Mask(kind, q, k), torch.ones_like(distance, dtype=torch.bool).tril()
        case MaskKind.BAND:
            return Mask(kind, q, k, lo=2, hi=11), (distance >= 2) & (distance <= 11)
        case MaskKind.PACKED:
            return packed(q, k)


def packed(q: range, k: range) -> tuple[Mask, Tensor]:
    """Documents of several lengths, some seen up to the diagonal, with gaps between them."""
    allowed = torch.zeros(len(q), len(k), dtype=torch.bool)
    bands, at, key = [], 0, 4
    q_at, k_at = torch.tensor(q)[:, None], torch.tensor(k)[None, :]
    for rows, cols, causal in ((5, 9, False), (1, 2, False), (13, 40, True), (30, 21, True)) * 3:
        band = Band(q0=at, q1=at + rows, k0=key, k1=key + cols, lo=at - key if causal else None)
        bands.append(band)
        inside = (q_at >= band.q0) & (q_at < band.q1) & (k_at >= band.k0) & (k_at < band.k1)
        allowed |= inside & (q_at - k_at >= at - key) if causal else inside
        at, key = at + rows + 2, key + cols + 1
    return Mask(MaskKind.PACKED, q, k, bands=BandArrays.of(bands)), allowed


def full(rows: int, cols: int) -> Mask:
    return Mask(MaskKind.FULL, range(rows), range(cols))


def complain(verdicts: Iterable[Verdict]) -> str:
    return "; ".join(str(v) for v in verdicts if not v.passed)


SHAPES = [
    (2, 6, 2, 37, 53, 5, 5),
    (1, 4, 4, 53, 37, 4, 4),
    (1, 6, 3, 70, 301, 64, 64),
    (2, 4, 1, 33, 29, 192, 128),
    (1, 2, 1, 29, 65, 256, 256),
    (1, 3, 1, 65, 41, 4, 7),
    (1, 2, 1, 1, 19, 8, 8),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_and_both_backwards_equal_the_oracle(
    shape: tuple[int, int, int, int, int, int, int], kind: MaskKind, dtype: torch.dtype
) -> None:
    q, k, v, dout = tensors(shape, dtype)
    mask, allowed = mask_of(kind, shape[3], shape[4])
    tolerance = calibrate(q, k, v, allowed, scale=0.2, dout=dout)
    out, lse = attend_call(q, k, v, mask, 0.2)
    by_out = attend_backward(dout, q, k, v, out, lse, mask, 0.2)
    by_delta = attend_backward_delta(dout, q, k, v, delta(out, dout), lse, mask, 0.2)

    assert out.dtype == dtype
    assert lse.dtype == accumulator_dtype(dtype)
    assert out.is_contiguous() or dtype != accumulator_dtype(dtype)
    assert lse.is_contiguous()
    for grads in (by_out, by_delta):
        result = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))

        assert not complain(judge(result, tolerance))
        assert all(g.dtype == dtype for g in grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [MaskKind.BAND, MaskKind.PACKED])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_masks_of_positions_are_right_in_many_small_blocks(
    shape: tuple[int, int, int, int, int, int, int],
    kind: MaskKind,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("SHORT_ROWS", 2), ("LONG_ROWS", 4), ("LONG", 9), ("STEP", 2)):
        monkeypatch.setattr(f"harness.plan.row_blocks._{name}", value)
    monkeypatch.setattr("harness.plan.row_blocks._MOST_KEYS", 40)
    q, k, v, dout = tensors(shape, dtype)
    mask, allowed = mask_of(kind, shape[3], shape[4])
    tolerance = calibrate(q, k, v, allowed, scale=0.2, dout=dout)
    out, lse = attend_call(q, k, v, mask, 0.2)
    grads = attend_backward(dout, q, k, v, out, lse, mask, 0.2)
    result = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))

    assert any(batch.common is not None for batch in batches(mask))
    assert not complain(judge(result, tolerance, merges=parts(mask)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lse_is_torch_logsumexp(dtype: torch.dtype) -> None:
    q, k, v, _ = tensors((2, 3, 3, 17, 29, 8, 8), dtype)
    _, lse = attend_call(q, k, v, full(17, 29), 0.3)
    expected = torch.logsumexp(q.double() @ k.double().mT * 0.3, dim=-1)

    torch.testing.assert_close(
        lse.double(), expected, rtol=0, atol=1e-13 if dtype == torch.float64 else 1e-4
    )


@pytest.mark.parametrize("tokens", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_side_is_answered_without_a_kernel(
    tokens: tuple[int, int], kind: MaskKind
) -> None:
    q, k, v, dout = tensors((2, 4, 2, *tokens, 8, 6), torch.float32)
    mask, _ = mask_of(kind, *tokens)
    out, lse = attend_call(q, k, v, mask, 1.0)
    grads = attend_backward(dout, q, k, v, out, lse, mask, 1.0)
    also = attend_backward_delta(dout, q, k, v, delta(out, dout), lse, mask, 1.0)

    assert out.shape == dout.shape
    assert not out.any()
    assert (lse == -math.inf).all()
    for x, grad in zip((q, k, v) * 2, (*grads, *also), strict=True):
        assert grad.shape == x.shape
        assert not grad.any()


def test_no_heads_and_no_batch_are_answered_without_a_kernel() -> None:
    for batch, heads in ((1, 0), (0, 2)):
        q, k, v, _ = tensors((batch, heads, heads, 3, 5, 8, 8), torch.float32)
        out, lse = attend_call(q, k, v, full(3, 5), 1.0)

        assert out.shape == q.shape
        assert lse.shape == q.shape[:3]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["out", "delta"])
def test_a_row_without_a_key_is_minus_infinity_and_has_no_gradient(
    dtype: torch.dtype, form: str
) -> None:
    q, k, v, dout = tensors((1, 4, 2, 9, 13, 8, 8), dtype)
    mask = Mask(MaskKind.BAND, range(9), range(6, 19), lo=0)
    out, lse = attend_call(q, k, v, mask, 0.4)
    if form == "out":
        grads = attend_backward(dout, q, k, v, out, lse, mask, 0.4)
    else:
        grads = attend_backward_delta(dout, q, k, v, delta(out, dout), lse, mask, 0.4)

    assert (lse[:, :, :6] == -math.inf).all()
    assert lse[:, :, 6:].isfinite().all()
    assert not out[:, :, :6].any()
    assert not grads[0][:, :, :6].any()
    assert not grads[2][:, :, 3:].any()
    assert all(bool(g.isfinite().all()) for g in grads)


def test_a_band_finds_its_keys_behind_a_thousand_hidden_ones() -> None:
    q, k, v, dout = tensors((1, 2, 1, 23, 1400, 16, 16), torch.float64)
    mask = Mask(MaskKind.BAND, range(1370, 1393), range(1400), lo=0, hi=40)
    distance = torch.arange(1370, 1393)[:, None] - torch.arange(1400)
    allowed = (distance >= 0) & (distance <= 40)
    tolerance = calibrate(q, k, v, allowed, scale=0.25, dout=dout)
    out, lse = attend_call(q, k, v, mask, 0.25)
    grads = attend_backward(dout, q, k, v, out, lse, mask, 0.25)
    result = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))

    assert not complain(judge(result, tolerance))


@pytest.mark.parametrize("bounds", [(None, 3), (3, None), (None, None)])
def test_a_bound_that_is_none_does_not_bind(bounds: tuple[int | None, int | None]) -> None:
    q, k, v, _ = tensors((1, 2, 1, 7, 11, 4, 4), torch.float64)
    lo, hi = bounds
    distance = torch.arange(7)[:, None] - torch.arange(11)
    allowed = (distance >= (-99 if lo is None else lo)) & (distance <= (99 if hi is None else hi))
    out, _ = attend_call(q, k, v, Mask(MaskKind.BAND, range(7), range(11), lo, hi), 0.5)

    torch.testing.assert_close(out, reference(q, k, v, allowed, 0.5)["out"], rtol=0, atol=1e-13)


def offset_copy(x: Tensor, bytes_off: int) -> Tensor:
    """A copy of x whose first element lies `bytes_off` past a 64-byte boundary."""
    store = x.new_empty(x.numel() + 128)
    start = (-store.data_ptr() % 64 + bytes_off) // x.element_size()
    copy = store[start : start + x.numel()].view(x.shape).copy_(x)
    assert copy.data_ptr() % 64 == bytes_off
    return copy


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_misaligned_or_strided_view_gives_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_to_kernel: list[Tensor] = []
    aligned = kernels._aligned
    monkeypatch.setattr(
        kernels, "_aligned", lambda x: given_to_kernel.append(aligned(x)) or given_to_kernel[-1]
    )
    inputs = tensors((1, 4, 2, 37, 53, 9, 9), dtype)
    mask = full(37, 53)

    def run(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        out, lse = attend_call(q, k, v, mask, 0.3)
        return out, lse, *attend_backward(dout, q, k, v, out, lse, mask, 0.3)

    expected = run(*inputs)
    off = run(*(offset_copy(x, 8) for x in inputs))
    strided = run(*(torch.stack((x, x), dim=-1)[..., 0] for x in inputs))
    for x, y, z in zip(expected, off, strided, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x, z)
    for x in given_to_kernel:
        assert x.data_ptr() % 16 == 0
        assert x.stride(-1) == 1


def test_token_major_inputs_give_contiguous_results() -> None:
    q, k, v, _ = tensors((2, 4, 2, 7, 11, 8, 8), torch.float32)
    expected, _ = attend_call(q, k, v, full(7, 11), 0.3)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    out, lse = attend_call(q, k, v, full(7, 11), 0.3)

    assert out.is_contiguous()
    assert lse.is_contiguous()
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["out", "delta"])
def test_partial_gradients_over_disjoint_keys_add_up(dtype: torch.dtype, form: str) -> None:
    q, k, v, dout = tensors((2, 6, 2, 37, 53, 16, 24), dtype)
    allowed = torch.ones(37, 53, dtype=torch.bool).tril()
    tolerance = calibrate(q, k, v, allowed, scale=0.25, dout=dout)
    acc = accumulator_dtype(dtype)
    cuts = [range(0, 11), range(11, 12), range(12, 40), range(40, 53)]
    masks = [Mask(MaskKind.BAND, range(37), cut, lo=0) for cut in cuts]
    parts = [(k[:, :, c.start : c.stop], v[:, :, c.start : c.stop]) for c in cuts]
    out_acc = torch.zeros(dout.shape, dtype=acc)
    lse = torch.full(dout.shape[:3], -math.inf, dtype=acc)
    for (k_part, v_part), mask in zip(parts, masks, strict=True):
        merge_(out_acc, lse, *attend_call(q, k_part, v_part, mask, 0.25))
    out = out_acc.to(dtype)
    dq = torch.zeros(q.shape, dtype=acc)
    dk, dv = [], []
    for (k_part, v_part), mask in zip(parts, masks, strict=True):
        if form == "out":
            grads = attend_backward(dout, q, k_part, v_part, out, lse, mask, 0.25)
        else:
            rowsum = delta(out, dout)
            grads = attend_backward_delta(dout, q, k_part, v_part, rowsum, lse, mask, 0.25)
        dq += grads[0]
        dk.append(grads[1])
        dv.append(grads[2])
    result = {
        "out": out,
        "lse": lse,
        "dq": dq.to(dtype),
        "dk": torch.cat(dk, dim=2),
        "dv": torch.cat(dv, dim=2),
    }

    assert not complain(judge(result, tolerance, merges=3))


@pytest.mark.parametrize("dims", [(5, 5), (64, 64), (24, 16), (16, 24)])
@pytest.mark.parametrize("kind", KINDS)
def test_delta_stands_for_the_output(dims: tuple[int, int], kind: MaskKind) -> None:
    q, k, v, dout = tensors((2, 6, 2, 37, 53, *dims), torch.float64)
    mask, _ = mask_of(kind, 37, 53)
    out, lse = attend_call(q, k, v, mask, 0.25)
    expected = attend_backward(dout, q, k, v, out, lse, mask, 0.25)
    actual = attend_backward_delta(dout, q, k, v, delta(out, dout), lse, mask, 0.25)

    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1e-4, 100.0, 1e8])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_low_precision_keeps_delta_to_float32(
    dtype: torch.dtype, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, dout = tensors((1, 2, 1, 19, 23, 8, 8), dtype)
    out, lse = attend_call(q, k, v, full(19, 23), 0.3)
    exact = size * delta(out, dout)
    seen: list[Tensor] = []
    backward = kernels._backward

    def spy(
        six: kernels_cuda.Six, mask: Mask, scale: float, *, dims: tuple[int, int]
    ) -> kernels_cuda.Triple:
        seen.append((six[0].double() * six[4].double()).sum(dim=-1))
        return backward(six, mask, scale, dims=dims)

    monkeypatch.setattr(kernels, "_backward", spy)
    attend_backward_delta(dout, q, k, v, exact, lse, full(19, 23), 0.3)

    torch.testing.assert_close(seen[0], exact.double(), rtol=2**-23, atol=2**-38)


def test_grouped_heads_do_not_lose_precision_in_bfloat16() -> None:
    q, k, v, dout = tensors((1, 8, 1, 512, 384, 64, 64), torch.bfloat16)
    mask = full(512, 384)
    ref = reference(q, k, v, torch.ones(512, 384, dtype=torch.bool), 0.125, dout)
    out, lse = attend_call(q, k, v, mask, 0.125)
    _, dk, dv = attend_backward(dout, q, k, v, out, lse, mask, 0.125)

    for name, x in (("dk", dk), ("dv", dv)):
        error = float((x.double() - ref[name]).abs().max() / ref[name].abs().max())

        assert error < 1e-2, name  # summed in bfloat16 by the operator itself it is 2e-2


@pytest.mark.parametrize("gap", [0.0, 1.0, 88.0, 110.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_merge_is_finite_for_any_gap_in_either_direction(gap: float, dtype: torch.dtype) -> None:
    for sign in (1, -1):
        a, b = (
            torch.full((2, 3, 5, 7), 2.0, dtype=dtype),
            torch.full((2, 3, 5, 7), 4.0, dtype=dtype),
        )
        lse_a = torch.full((2, 3, 5), -sign * gap / 2, dtype=dtype)
        lse_b = -lse_a
        merge_(a, lse_a, b, lse_b)
        share = 1 / (1 + math.exp(-min(sign * gap, 700))) if sign * gap > -700 else 0.0

        torch.testing.assert_close(a, torch.full_like(a, 2 + 2 * share))
        expected = gap / 2 + math.log1p(math.exp(-gap))
        torch.testing.assert_close(lse_a, torch.full_like(lse_a, expected))


def test_merge_ignores_a_side_that_saw_no_key() -> None:
    out, lse = torch.randn(2, 3, 5, 7), torch.randn(2, 3, 5)
    empty, never = torch.zeros(2, 3, 5, 7), torch.full((2, 3, 5), -math.inf)

    out_acc, lse_acc = empty.clone(), never.clone()
    merge_(out_acc, lse_acc, empty, never)
    assert not out_acc.any()
    assert (lse_acc == -math.inf).all()

    merge_(out_acc, lse_acc, out, lse)
    assert torch.equal(out_acc, out)
    assert torch.equal(lse_acc, lse)

    merge_(out_acc, lse_acc, empty, never)
    assert torch.equal(out_acc, out)
    assert torch.equal(lse_acc, lse)


@pytest.mark.parametrize("cached", [1, 140, 1 << 17])
def test_a_merge_of_values_is_that_of_their_accumulators_rounded_once(
    cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many heads go at a time, in place or into another tensor of another layout."""
    monkeypatch.setattr(kernels, "_CACHED_ELEMENTS", cached)
    outs = torch.randn(2, 2, 6, 5, 7).bfloat16()
    lses = torch.randn(2, 2, 6, 5)
    wide, wide_lse = outs[0].float(), lses[0].clone()
    merge_(wide, wide_lse, outs[1].float(), lses[1])
    share = (lses[1] - lses[0]).sigmoid().unsqueeze(-1)
    torch.testing.assert_close(wide, (1 - share) * outs[0].float() + share * outs[1].float())

    for part in (outs[1], outs[1].float()):
        for other in (False, True):
            loose = outs[0].transpose(1, 2).contiguous().transpose(1, 2)
            lse, into = lses[0].clone(), torch.empty(outs[0].shape, dtype=torch.bfloat16)
            merge_(loose, lse, part, lses[1], into if other else None)

            assert torch.equal(into if other else loose, wide.bfloat16())
            assert torch.equal(loose, outs[0]) == other
            assert torch.equal(lse, wide_lse)


@pytest.mark.parametrize("cached", [1, 140, 1 << 17])
def test_a_sum_is_made_in_the_higher_precision_and_rounded_once(
    cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_CACHED_ELEMENTS", cached)
    first, second = torch.randn(2, 6, 5, 7), torch.randn(2, 6, 5, 7)
    for one, other in product((torch.bfloat16, torch.float32), repeat=2):
        a, b = first.to(one), second.to(other)
        expected = (a.float() + b.float()).to(one)
        target = torch.full(a.shape, math.nan, dtype=one)
        add(a, b, target)
        add(a, b, a)

        assert torch.equal(target, expected)
        assert torch.equal(a, expected)


def test_merge_does_not_hide_a_nan() -> None:
    out_acc, lse_acc = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1)
    merge_(out_acc, lse_acc, torch.ones(1, 1, 1, 2), torch.full((1, 1, 1), math.nan))

    assert lse_acc.isnan().all()
    assert out_acc.isnan().all()


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(5)), st.integers(0, 2**31), st.floats(0.1, 300))
def test_merge_gives_the_same_in_any_order_and_nesting(
    order: list[int], seed: int, spread: float
) -> None:
    rng = torch.Generator().manual_seed(seed)
    outs = torch.randn((5, 2, 3, 7), generator=rng, dtype=torch.float64)
    lses = spread * torch.randn((5, 2, 3), generator=rng, dtype=torch.float64)
    lses[torch.rand((5, 2, 3), generator=rng) < 0.2] = -math.inf
    outs[lses == -math.inf] = 0.0
    weights = torch.softmax(lses, dim=0).nan_to_num()
    expected = (weights[..., None] * outs).sum(dim=0), torch.logsumexp(lses, dim=0)
    line = outs[order[0]].clone(), lses[order[0]].clone()
    for part in order[1:]:
        merge_(*line, outs[part], lses[part])
    tree = outs[order[0]].clone(), lses[order[0]].clone()
    branch = outs[order[3]].clone(), lses[order[3]].clone()
    merge_(*tree, outs[order[1]], lses[order[1]])
    merge_(*branch, outs[order[4]], lses[order[4]])
    merge_(*branch, outs[order[2]], lses[order[2]])
    merge_(*tree, *branch)

    for actual in (line, tree):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


class Ledger(TorchDispatchMode):
    """Record the storages that operators return, as (elements, dtype), once each."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.known = {x.untyped_storage().data_ptr() for x in known}
        self.kept: list[Tensor] = []
        self.sizes: list[tuple[int, torch.dtype]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.known.add(x.untyped_storage().data_ptr())
                self.kept.append(x)
                self.sizes.append((x.untyped_storage().nbytes() // x.element_size(), x.dtype))
        return result


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_allocates_what_it_says(dtype: torch.dtype) -> None:
    acc = accumulator_dtype(dtype)
    out, lse = torch.randn(2, 3, 5, 7).to(dtype), torch.randn(2, 3, 5).to(acc)
    out_acc, lse_acc = torch.zeros(2, 3, 5, 7, dtype=acc), torch.zeros(2, 3, 5, dtype=acc)
    with Ledger(out, lse, out_acc, lse_acc) as ledger:
        merge_(out_acc, lse_acc, out, lse)
    upcast = [(210, acc)] if dtype != acc else []

    assert ledger.sizes == [(30, acc), (30, torch.bool), *upcast]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attend_allocates_what_it_says(dtype: torch.dtype) -> None:
    q, k, v, dout = tensors((2, 6, 2, 5, 7, 8, 8), dtype)
    acc = accumulator_dtype(dtype)
    with Ledger(q, k, v) as forward:
        out, lse = attend_call(q, k, v, full(5, 7), 1.0)
    with Ledger(q, k, v, dout, out, lse) as backward:
        attend_backward(dout, q, k, v, out, lse, full(5, 7), 1.0)
    side, rows, keys = 2 * 6 * 5 * 8, 2 * 6 * 5, 2 * 2 * 7 * 8
    if dtype == acc:
        grads = [(side, dtype), (keys, dtype), (keys, dtype)]
    else:
        grads = [(side, dtype), (3 * keys, dtype), (3 * keys, dtype)]
        grads += [(side, dtype), *2 * [(keys, acc), (keys, dtype)]]

    assert forward.sizes == [(side, dtype), (rows, acc), (rows, acc)]
    assert backward.sizes == [(rows, torch.bool), (rows, acc), *grads]


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_an_unknown_dtype_is_refused_with_the_known_ones(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match=r"torch\.float64"):
        accumulator_dtype(dtype)


def test_inputs_that_do_not_fit_are_refused() -> None:
    q, k, v, dout = tensors((2, 4, 2, 5, 7, 8, 6), torch.float32)
    mask = full(5, 7)
    out, lse = attend_call(q, k, v, mask, 1.0)
    with pytest.raises(ValueError, match="dtype and device must be one"):
        attend_call(q, k.double(), v, mask, 1.0)
    with pytest.raises(ValueError, match="batch must be one"):
        attend_call(q[:1], k, v, mask, 1.0)
    with pytest.raises(ValueError, match="agree in heads and tokens"):
        attend_call(q, k, v[:, :, 1:], mask, 1.0)
    with pytest.raises(ValueError, match="one head_dim"):
        attend_call(q[..., :4], k, v, mask, 1.0)
    with pytest.raises(ValueError, match="multiple of heads_kv"):
        attend_call(q[:, :3], k, v, mask, 1.0)
    with pytest.raises(ValueError, match="each must be"):
        attend_call(q[0], k, v, mask, 1.0)
    with pytest.raises(ValueError, match="mask is 7 x 5"):
        attend_call(q, k, v, full(7, 5), 1.0)
    with pytest.raises(ValueError, match=r"out .* must be"):
        attend_backward(dout, q, k, v, out[..., 1:], lse, mask, 1.0)
    with pytest.raises(ValueError, match=r"lse .* must be"):
        attend_backward(dout, q, k, v, out, lse.double(), mask, 1.0)
    with pytest.raises(ValueError, match=r"delta .* must be"):
        attend_backward_delta(dout, q, k, v, lse.half(), lse, mask, 1.0)
    with pytest.raises(ValueError, match="must be like out"):
        delta(out, dout[:, 1:])
    with pytest.raises(ValueError, match="must both be float32"):
        merge_(out.double(), lse, out, lse)
    with pytest.raises(ValueError, match="rows x E"):
        merge_(out, lse, out[:, 1:], lse)
    with pytest.raises(UnsupportedError, match="meta"):
        attend_call(q.to("meta"), k.to("meta"), v.to("meta"), mask, 1.0)


def test_packed_takes_bands_and_nothing_else_does() -> None:
    bands = BandArrays.of([Band(q0=0, q1=3, k0=0, k1=3)])
    with pytest.raises(ValueError, match="got none"):
        Mask(MaskKind.PACKED, range(3), range(3))
    with pytest.raises(ValueError, match="got 1"):
        Mask(MaskKind.FULL, range(3), range(3), bands=bands)


def test_bounds_without_a_band_are_refused() -> None:
    with pytest.raises(ValueError, match="use BAND"):
        Mask(MaskKind.CAUSAL, range(3), range(3), lo=0)


def test_results_carry_no_autograd_history() -> None:
    q, k, v, _ = tensors((1, 2, 1, 5, 7, 8, 8), torch.float32)
    out, lse = attend_call(q.requires_grad_(), k, v, full(5, 7), 1.0)

    assert not out.requires_grad
    assert not lse.requires_grad


def test_capabilities_name_every_kernel() -> None:
    found = kernels.capabilities()

    assert found["torch_cpu"] == "ok"
    assert set(found) == {"torch_cpu", *kernels_cuda.FINDERS}
    if not torch.cuda.is_available():
        assert {found[name] for name in kernels_cuda.FINDERS} == {"no CUDA device"}


# What stands in for a GPU: the plain path runs anywhere, and fakes have the parameters of the real.


def bias_of(kind: MaskKind, rows: int, cols: int, dtype: torch.dtype) -> Tensor | None:
    mask, allowed = mask_of(kind, rows, cols)
    if mask.kind not in (MaskKind.BAND, MaskKind.PACKED):
        return None
    return torch.zeros(1, 1, rows, cols, dtype=dtype).masked_fill(~allowed, -math.inf)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_plain_products_equal_the_oracle(
    kind: MaskKind, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, dout = tensors((2, 6, 2, 37, 53, 8, 8), dtype)
    _, allowed = mask_of(kind, 37, 53)
    tolerance = calibrate(q, k, v, allowed, scale=0.3, dout=dout)
    bias = bias_of(kind, 37, 53, dtype)
    causal = kind is MaskKind.CAUSAL
    monkeypatch.setattr(kernels_cuda, "_found", lambda: {"flash": "none here"})
    out, lse = kernels_cuda.forward(q, k, v, bias, causal=causal, scale=0.3)
    seen = lse.masked_fill(lse == -math.inf, math.inf)
    grads = kernels_cuda.backward((dout, q, k, v, out, seen), bias, causal=causal, scale=0.3)
    result = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))

    assert not complain(judge(result, tolerance))


FLASH_2 = (
    "q k v dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes "
    "return_softmax",
    "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal window_size_left "
    "window_size_right softcap alibi_slopes deterministic rng_state=",
)
FLASH_2_OLD = (
    "q k v dropout_p softmax_scale causal window_size alibi_slopes return_softmax",
    "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal window_size alibi_slopes "
    "deterministic rng_state=",
)
FLASH_3 = (
    "q k v k_new= v_new= qv= out_= softmax_scale= causal= window_size_left= window_size_right= "
    "attention_chunk= softcap= num_splits= pack_gqa= sm_margin=",
    "dout q k v out softmax_lse sequed_q= sequed_k= dq= dk= dv= softmax_scale= is_causal= "
    "window_size_left= window_size_right= softcap= deterministic= sm_margin=",
)


def fake_flash(parameters: tuple[str, str]) -> SimpleNamespace:
    """A module with these parameters, `=` for a default, over plain products.

    Its entries look like torch custom ops, and refuse what the adapter must not ask.
    """

    def check(given: Mapping[str, Tensor]) -> tuple[bool, float]:
        assert given.get("dropout_p", 0.0) == given.get("softcap", 0.0) == 0.0
        assert given.get("window_size", (-1, -1)) == (-1, -1)
        assert given.get("window_size_left", -1) == given.get("window_size_right", -1) == -1
        assert not given.get("return_softmax", False)
        assert not given.get("deterministic", False)
        assert given.get("alibi_slopes") is given.get("rng_state") is None
        causal = given["causal"] if "causal" in given else given["is_causal"]
        assert not causal or given["q"].shape[1] == given["k"].shape[1]
        assert given["q"].shape[3] % 8 == 0
        return bool(causal), float(given["softmax_scale"])

    def forward(**given: Tensor) -> tuple[Tensor | None, ...]:
        causal, scale = check(given)
        q, k, v = (given[n].transpose(1, 2) for n in ("q", "k", "v"))
        out, lse = kernels_cuda.math_forward(q, k, v, None, causal=causal, scale=scale)
        out = out.transpose(1, 2)
        if parameters is FLASH_2_OLD:
            return out, given["q"], given["k"], given["v"], out, lse, None, torch.empty(2)
        return out, lse, torch.empty(0), torch.empty(2)

    def backward(**given: Tensor) -> Tensor:
        causal, scale = check(given)
        dout, q, k, v, out = (given[n].transpose(1, 2) for n in ("dout", "q", "k", "v", "out"))
        six = (dout, q, k, v, out, given["softmax_lse"])
        grads = kernels_cuda.math_backward(six, None, causal=causal, scale=scale)
        for name, x in zip(("dq", "dk", "dv"), grads, strict=True):
            assert given[name].is_contiguous()
            given[name].copy_(x.transpose(1, 2))
        return torch.empty(0)

    for function, names in zip((forward, backward), parameters, strict=True):
        function.__signature__ = inspect.Signature(
            [
                inspect.Parameter(
                    name.removesuffix("="),
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default="wrong" if name.endswith("=") else inspect.Parameter.empty,
                )
                for name in names.split()
            ]
        )

    def as_custom_op(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: Tensor, **given: Tensor) -> object:
            return function(*args, **given)

        call._init_fn = function
        return call

    return SimpleNamespace(
        _flash_attn_forward=as_custom_op(forward), _flash_attn_backward=as_custom_op(backward)
    )


@pytest.mark.parametrize("parameters", [FLASH_2, FLASH_2_OLD, FLASH_3], ids=["2", "2-old", "3"])
@pytest.mark.parametrize("tokens", [(37, 53), (53, 37), (41, 41)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_flash_kernel_is_asked_only_for_what_it_does(
    parameters: tuple[str, str],
    tokens: tuple[int, int],
    causal: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels_cuda, "import_module", lambda _: fake_flash(parameters))
    flash = kernels_cuda.flash_attn_adapter("flash")
    monkeypatch.setattr(kernels_cuda, "_found", lambda: {"absent": "why", "flash": flash})
    q, k, v, dout = tensors((2, 6, 2, *tokens, 5, 5), torch.bfloat16)
    allowed = torch.ones(tokens, dtype=torch.bool)
    tolerance = calibrate(q, k, v, allowed.tril() if causal else allowed, scale=0.3, dout=dout)
    out, lse = kernels_cuda.forward(q, k, v, None, causal=causal, scale=0.3)
    grads = kernels_cuda.backward((dout, q, k, v, out, lse), None, causal=causal, scale=0.3)
    result = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))

    assert not complain(judge(result, tolerance))


def test_a_kernel_with_an_unknown_parameter_is_refused() -> None:
    def needs_more(q: Tensor, causal: bool, sinks: Tensor) -> None: ...

    def has_less(q: Tensor) -> None: ...

    with pytest.raises(UnsupportedError, match="sinks"):
        kernels_cuda.bind(needs_more, {"q": 0, "causal": False})
    with pytest.raises(UnsupportedError, match=r"has no \['k', 'causal'\]"):
        kernels_cuda.bind(has_less, {"q": 0, "k": 0, "causal": False})


@pytest.mark.parametrize("direction", ["", "_backward"])
@pytest.mark.parametrize("family", ["flash", "cudnn"])
def test_the_arguments_of_torch_operators_are_where_the_adapters_put_them(
    family: str, direction: str
) -> None:
    name = f"_scaled_dot_product_{family}_attention{direction}"
    names = [a.name for a in getattr(torch.ops.aten, name).default._schema.arguments]
    expected = {
        "_scaled_dot_product_flash_attention": "query key value dropout_p is_causal "
        "return_debug_mask scale",
        "_scaled_dot_product_flash_attention_backward": "grad_out query key value out logsumexp "
        "cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed philox_offset scale",
        "_scaled_dot_product_cudnn_attention": "query key value attn_bias compute_log_sumexp "
        "dropout_p is_causal return_debug_mask scale",
        "_scaled_dot_product_cudnn_attention_backward": "grad_out query key value out logsumexp "
        "philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k dropout_p is_causal "
        "scale",
    }

    assert names == expected[name].split()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cuda_equals_the_oracle(
    shape: tuple[int, int, int, int, int, int, int], kind: MaskKind, dtype: torch.dtype
) -> None:
    q, k, v, dout = tensors(shape, dtype)
    mask, allowed = mask_of(kind, shape[3], shape[4])
    tolerance = calibrate(q, k, v, allowed, scale=0.2, dout=dout)
    q, k, v, dout = (x.cuda() for x in (q, k, v, dout))
    out, lse = attend_call(q, k, v, mask, 0.2)
    by_out = attend_backward(dout, q, k, v, out, lse, mask, 0.2)
    by_delta = attend_backward_delta(dout, q, k, v, delta(out, dout), lse, mask, 0.2)
    for grads in (by_out, by_delta):
        result = {"out": out, "lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))

        assert not complain(judge({n: x.cpu() for n, x in result.items()}, tolerance))

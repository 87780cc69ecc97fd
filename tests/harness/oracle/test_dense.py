"""The oracle against autograd, against closed forms, and against itself in low precision."""

import math

import pytest
import torch
from torch import Tensor

from harness.oracle.dense import naive_twin, reference, spreads

SCALE = 0.37


def tensors(
    heads: tuple[int, int], tokens: tuple[int, int], dims: tuple[int, int], seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, dout in float64 for a batch of two."""
    rng = torch.Generator().manual_seed(seed)
    shapes = (
        (2, heads[0], tokens[0], dims[0]),
        (2, heads[1], tokens[1], dims[0]),
        (2, heads[1], tokens[1], dims[1]),
        (2, heads[0], tokens[0], dims[1]),
    )
    q, k, v, dout = (torch.randn(s, generator=rng, dtype=torch.float64) for s in shapes)
    return q, k, v, dout


def ragged(rows: int, cols: int) -> Tensor:
    """Allow about half of all pairs, and every query at least key 0."""
    rng = torch.Generator().manual_seed(rows * cols)
    allowed = torch.rand(rows, cols, generator=rng) < 0.5
    allowed[:, 0] = True
    return allowed


def by_autograd(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, dout: Tensor
) -> dict[str, Tensor]:
    """The same results by a batched softmax and torch's own differentiation."""
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("bhsd,bhtd->bhst", q, keys) * SCALE
    scores = scores.masked_fill(~allowed, -math.inf)
    out = torch.softmax(scores, dim=-1) @ values
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    lse = torch.logsumexp(scores, dim=-1).detach()
    return {"out": out.detach(), "lse": lse, "dq": dq, "dk": dk, "dv": dv}


@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (5, 1)])
@pytest.mark.parametrize("dims", [(4, 4), (5, 7)])
def test_reference_is_the_softmax_that_autograd_differentiates(
    heads: tuple[int, int], dims: tuple[int, int]
) -> None:
    q, k, v, dout = tensors(heads, (11, 17), dims)
    allowed = ragged(11, 17)
    expected = by_autograd(q, k, v, allowed, dout)
    actual = reference(q, k, v, allowed, SCALE, dout)

    assert set(expected) == set(actual)
    for name, x in expected.items():
        torch.testing.assert_close(actual[name], x, rtol=1e-12, atol=1e-13, msg=name)


def test_gradients_are_the_slopes_of_the_output() -> None:
    q, k, v, dout = tensors((4, 2), (5, 7), (3, 2))
    allowed = ragged(5, 7)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> float:
        return float((reference(q, k, v, allowed, SCALE)["out"] * dout).sum())

    grads = reference(q, k, v, allowed, SCALE, dout)
    step = 1e-6
    for position, name in enumerate(("q", "k", "v")):
        direction = torch.randn((q, k, v)[position].shape, dtype=torch.float64)
        ends = []
        for sign in (1, -1):
            moved = [q, k, v]
            moved[position] = moved[position] + sign * step * direction
            ends.append(loss(*moved))
        slope = (ends[0] - ends[1]) / (2 * step)

        assert float((grads[f"d{name}"] * direction).sum()) == pytest.approx(slope, rel=1e-6)


def test_a_query_head_reads_the_kv_head_of_its_own_group() -> None:
    q, k, _, _ = tensors((6, 2), (3, 5), (4, 1))
    v = torch.tensor([10.0, 20.0], dtype=torch.float64).expand(2, 5, 1, 2).permute(0, 3, 1, 2)
    out = reference(q, k, v, torch.ones(3, 5, dtype=torch.bool), SCALE)["out"]

    assert out[0, :, 0, 0].tolist() == pytest.approx([10, 10, 10, 20, 20, 20])


def test_a_row_that_meets_no_key_is_zero_and_has_no_gradient() -> None:
    q, k, v, dout = tensors((2, 1), (4, 6), (3, 5))
    allowed = ragged(4, 6)
    allowed[2] = False
    result = reference(q, k, v, allowed, SCALE, dout)
    without = reference(
        *(x[:, :, [0, 1, 3]] if x is q else x for x in (q, k, v)),
        allowed[[0, 1, 3]],
        SCALE,
        dout[:, :, [0, 1, 3]],
    )

    assert (result["lse"][:, :, 2] == -math.inf).all()
    assert not result["out"][:, :, 2].any()
    assert not result["dq"][:, :, 2].any()
    torch.testing.assert_close(result["dk"], without["dk"], rtol=1e-13, atol=1e-14)
    torch.testing.assert_close(result["dv"], without["dv"], rtol=1e-13, atol=1e-14)


def test_no_key_at_all_is_an_empty_softmax() -> None:
    q, k, v, dout = tensors((2, 1), (4, 0), (3, 5))
    result = reference(q, k, v, torch.ones(4, 0, dtype=torch.bool), SCALE, dout)

    assert (result["lse"] == -math.inf).all()
    assert not result["out"].any()
    assert result["dk"].shape == k.shape


def test_lse_is_a_natural_logarithm() -> None:
    q, k, v, _ = tensors((1, 1), (1, 2), (1, 1))
    k = torch.zeros_like(k)
    lse = reference(q, k, v, torch.ones(1, 2, dtype=torch.bool), SCALE)["lse"]

    assert float(lse[0, 0, 0]) == pytest.approx(math.log(2))


def test_scores_of_a_thousand_stay_finite() -> None:
    q, k, v, dout = tensors((2, 1), (4, 6), (3, 5))
    result = reference(1e3 * q, k, v, ragged(4, 6), SCALE, dout)

    assert all(bool(x.isfinite().all()) for x in result.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_twin_computes_in_the_precision_of_its_inputs(dtype: torch.dtype) -> None:
    low = [x.to(dtype) for x in tensors((4, 2), (23, 31), (8, 6))]
    allowed = ragged(23, 31)
    twin = naive_twin(*low[:3], allowed, SCALE, low[3])
    ref = reference(*low[:3], allowed, SCALE, low[3])
    eps = torch.finfo(dtype).eps

    for name, x in twin.items():
        error = float((x.double() - ref[name]).abs().max() / ref[name].abs().max())

        assert x.dtype == dtype
        assert eps / 16 < error < 16 * eps, name


def test_spreads_know_one_key_from_many() -> None:
    q, k, _, _ = tensors((4, 2), (9, 16), (3, 1))
    every = torch.ones(9, 16, dtype=torch.bool)
    one = torch.zeros(9, 16, dtype=torch.bool)
    one[:, 0] = True

    assert spreads(0 * q, k, every, SCALE) == pytest.approx((1 / 4, (2 * 9 / 16**2) ** 0.5))
    assert spreads(q, k, one, SCALE) == pytest.approx((1, (2 * 9) ** 0.5))
    assert spreads(q, k, ~every, SCALE) == (0, 0)

    one[3] = False  # an empty row does not hide the others
    assert spreads(q, k, one, SCALE) == pytest.approx((1, (2 * 8) ** 0.5))


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v, dout = tensors((4, 2), (5, 7), (3, 2))
    allowed = ragged(5, 7)
    with pytest.raises(ValueError, match="do not fit"):
        reference(q, k, v[:, :, 1:], allowed, SCALE)
    with pytest.raises(ValueError, match="multiple"):
        reference(q[:, :3], k, v, allowed, SCALE)
    with pytest.raises(ValueError, match="allowed"):
        reference(q, k, v, allowed.T, SCALE)
    with pytest.raises(ValueError, match="dout"):
        reference(q, k, v, allowed, SCALE, dout[:, :, 1:])

r"""The one rule by which a result is right or wrong.

The error of a tensor is `max|x - ref| / scale`, ref from the float64 oracle. It may be at most

    float64:  1e-12
    others:   factor * e_twin + floor

where e_twin is the error of `oracle.naive_twin` on the same inputs (lse: of the twin in float32,
since lse is kept in float32 in every precision), and factor is 2, for gradients 3, as in
flash-attention's own tests (tests/test_flash_attn.py). The twin measures what these inputs cost in
this precision; the floor is for what it has not got, or got right by luck. Nothing is set per case.

**Scale.** `max|ref|`, or, where the result itself nearly cancels (one key in a row: dq is 0), the
size of the terms that cancel:

    out   rho_q |v|
    lse   1
    dq    rho_q |dout| |v| |k| softmax_scale
    dk    rho_k |dout| |v| |q| softmax_scale
    dv    rho_k |dout|

A gradient of lse adds `|dlse|` to `|dout| |v|`, and a sink's gradient has that sum as its scale.
`|x|` is the largest magnitude in x. rho_q is the largest `sqrt(sum_j p_ij^2)` of a query and rho_k
the largest `sqrt(sum_i p_ij^2)` of a key (over all queries of its group): each weight carries an
independent rounding, so their sum grows as the root of the sum of squares. rho_q is 1 where a query
has one key and `1 / sqrt(T)` where it has T alike. Without rho the scale of a long unmasked softmax
would stay at |v| while its output shrinks as `1 / sqrt(T)`, until zeros pass for an answer. The
inner product over head_dim needs no factor: |dout| |v| is a product of maxima, about 3 standard
deviations each, and sqrt(D) is 8 to 16.

**Floor.** Half an epsilon for each rounding of a value as large as the scale: those to the dtype of
the inputs, which are independent, so that n of them add as sqrt(n); and those in float32, where the
kernels and the merges accumulate, for head_dim D, m merges and L = max(1, |lse|):

    floor = (sqrt(n) * eps(dtype) + a * eps(float32)) / 2
    a     = sqrt(D) + 2 L (m + 1) + 2 m

- n, out: 3 = the weights before they meet v, the partial outputs, and the result. Merges add none:
  partial outputs are mixed with weights that add up to 1.
- n, dq dk dv: 4 + m + 1 = the weights, their gradients, the output in the row sum, and the result;
  and m + 1 partial gradients, each rounded once, added up in float32. Where partial gradients cross
  between ranks in the dtype of the inputs, one more for each rank that a sum may visit.
- n, lse: 1/64. It is never held in the input's precision, but kernels take the exponential only to
  a fraction of it. An eighth of a rounding lets that pass and not an lse cast to bfloat16.
- a: sqrt(D) = the score, a sum of D terms whose roundings are independent. 2 L = the scores that
  count and the lse, each rounded at its own size; a weight `exp(score - lse)` has those roundings
  as its relative error. A merge again takes the difference of two lse and rounds a new one, and
  rounds the weight and the mix besides. In lse itself, relative to L, L is 1.

**Layers.** The same rule, for y, dx and the weights' gradients, with the naive twin of the layer. A
result is a sum of products of an attention's result and a weight or an input; the size of its terms
is the product of their sizes: y |w_o|, dx the largest of dq |w_q|, dk |w_k| and dv |w_v|, dw_q
dq |x|, and so on, with the sizes above for out, dq, dk and dv. To n come the roundings of what
attention is given (q, k, v, dout) and of the product; to a, sqrt(N) for the longest sum of N terms,
over the model's width, all heads or all tokens.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.oracle.dense import UNCHANGED, Scores, layer, naive_twin, reference, spreads

FLOAT64_LIMIT = 1e-12
_ROUNDED = {"out": (2, 3.0), "lse": (2, 1 / 64), "y": (2, 3.0)}
"""Factor of the twin's error, and roundings to the dtype; gradients have more of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Reference results for one set of inputs, and the error that each result may have.

    Args:
        dtype: Of the inputs.
        head_dim: Of q and k.
        reference: The oracle's tensors by name, float64.
        scales: Divisor of the error of each.
        twin_errors: The naive twin's error in each; 0 for float64, which has no twin.
        longest_sum: Terms of the longest sum of a product outside attention; 0 without one.
    """

    dtype: torch.dtype
    head_dim: int
    reference: Mapping[str, Tensor]
    scales: Mapping[str, float]
    twin_errors: Mapping[str, float]
    longest_sum: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The error of one tensor beside the most it may be; both relative to the same scale."""

    name: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the limit."""
        return self.error <= self.limit

    def __str__(self) -> str:
        return f"{self.name}: error {self.error:.2e}, limit {self.limit:.2e}"


def calibrate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    *,
    scale: float,
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    scores: Scores = UNCHANGED,
) -> Tolerance:
    """Run the oracle and its twin on these inputs, once for any number of results to judge.

    Args:
        q: `(B, H, S, D)`, in the dtype under test.
        k: `(B, G, T, D)`.
        v: `(B, G, T, E)`.
        allowed: Bool `(S, T)`.
        scale: Factor of the scores.
        dout: Gradient of out, `(B, H, S, E)`; None = judge the forward only.
        dlse: Gradient of lse, `(B, H, S)`; None = 0.
        scores: What else is done to the scores.
    """
    ref = reference(q, k, v, allowed, scale, dout, dlse=dlse, scores=scores)
    scales = _scales(ref, (q, k, v), allowed, scale, dout, dlse, scores)
    if q.dtype == torch.float64:
        twin_errors = dict.fromkeys(ref, 0.0)
    else:
        twin = naive_twin(q, k, v, allowed, scale, dout, dlse=dlse, scores=scores)
        if q.dtype != torch.float32:
            wide = naive_twin(q.float(), k.float(), v.float(), allowed, scale, scores=scores)
            twin["lse"] = wide["lse"]
        twin_errors = {name: _error(twin[name], ref[name], scales[name]) for name in ref}
    return Tolerance(
        dtype=q.dtype, head_dim=q.shape[3], reference=ref, scales=scales, twin_errors=twin_errors
    )


def calibrate_layer(
    x: Tensor,
    weights: Mapping[str, Tensor],
    allowed: Tensor,
    *,
    scale: float,
    dy: Tensor,
    rotary: float | None,
) -> Tolerance:
    """As `calibrate`, for a whole layer; arguments as `oracle.layer`, in the dtype under test.

    The reference's tensors are shaped as slabs: y and dx `(B, 1, S, M)`, gradients of weights
    `(1, H, 1, D * M)`.
    """
    ref = layer(x, weights, allowed, scale, dy, rotary=rotary)
    of = _scales(ref, (ref["q"], ref["k"], ref["v"]), allowed, scale, ref["dout"])
    size = {name: _largest(w) for name, w in weights.items()}
    terms = {
        "y": of["out"] * size["w_o"],
        "dx": max(of["dq"] * size["w_q"], of["dk"] * size["w_k"], of["dv"] * size["w_v"]),
        "dw_q": of["dq"] * _largest(x),
        "dw_k": of["dk"] * _largest(x),
        "dw_v": of["dv"] * _largest(x),
        "dw_o": of["out"] * _largest(dy),
    }
    scales = {name: max(_largest(ref[name]), term) for name, term in terms.items()}
    if x.dtype == torch.float64:
        twin_errors = dict.fromkeys(terms, 0.0)
    else:
        twin = layer(x, weights, allowed, scale, dy, rotary=rotary, dtype=x.dtype)
        twin_errors = {name: _error(twin[name], ref[name], scales[name]) for name in terms}
    return Tolerance(
        dtype=x.dtype,
        head_dim=ref["q"].shape[3],
        reference={name: _as_slab(name, ref[name]) for name in terms},
        scales={**scales, "lse": of["lse"]},
        twin_errors=twin_errors,
        longest_sum=max(x.shape[2], x.shape[1], ref["out"].shape[1] * ref["out"].shape[3]),
    )


def _as_slab(name: str, x: Tensor) -> Tensor:
    return x.flatten(1)[None, :, None] if name.startswith("dw") else x[:, None]


def _scales(
    ref: Mapping[str, Tensor],
    qkv: tuple[Tensor, Tensor, Tensor],
    allowed: Tensor,
    scale: float,
    dout: Tensor | None,
    dlse: Tensor | None = None,
    scores: Scores = UNCHANGED,
) -> dict[str, float]:
    """Scale of each result of attention: its error is divided by it."""
    q, k, v = qkv
    rho_q, rho_k = spreads(q, k, allowed, scale, scores)
    terms = {"out": rho_q * _largest(v), "lse": 1.0}
    if dout is not None:
        through = _largest(dout) * _largest(v) * abs(scale)
        if dlse is not None:
            through += _largest(dlse) * abs(scale)
        terms["dq"] = rho_q * through * _largest(k)
        terms["dk"] = rho_k * through * _largest(q)
        terms["dv"] = rho_k * _largest(dout)
        if scores.sinks is not None:
            terms["dsinks"] = through / abs(scale)
    return {name: max(_largest(ref[name]), term) for name, term in terms.items()}


def errors(results: Mapping[str, Tensor], tolerance: Tolerance) -> dict[str, float]:
    """Return the error of each tensor; inf for a NaN, or for an infinity where ref has another.

    Args:
        results: Any of "out", "lse", "dq", "dk", "dv", or of a layer's, shaped as the oracle's.
        tolerance: Made from the same inputs.

    Raises:
        ValueError: If a name is unknown or a shape is not the oracle's.
    """
    for name, x in results.items():
        if name not in tolerance.reference:
            msg = f"tolerance: no reference for {name!r}; known: {', '.join(tolerance.reference)}"
            raise ValueError(msg)
        if x.shape != tolerance.reference[name].shape:
            want = tuple(tolerance.reference[name].shape)
            msg = f"tolerance: {name} is {tuple(x.shape)}, the oracle's is {want}"
            raise ValueError(msg)
    return {
        name: _error(x, tolerance.reference[name], tolerance.scales[name])
        for name, x in results.items()
    }


def limit(name: str, tolerance: Tolerance, *, merges: int = 0, sent: int = 0) -> float:
    """Return the largest error that the tensor may have.

    Args:
        name: "out", "lse", "dq", "dk" or "dv"; of a layer "y", "dx", "dw_q", ...
        tolerance: Of the inputs.
        merges: How often an output row was merged, at most: number of partial results less one.
        sent: How often a partial gradient was rounded to be sent, at most.
    """
    if tolerance.dtype == torch.float64:
        return FLOAT64_LIMIT
    factor, stored = _ROUNDED.get(name, (3, merges + sent + 5.0))
    if tolerance.longest_sum:
        stored += 5.0
    largest_lse = 1.0 if name == "lse" else tolerance.scales["lse"]
    accumulated = math.sqrt(tolerance.head_dim) + 2 * largest_lse * (merges + 1) + 2 * merges
    accumulated += math.sqrt(tolerance.longest_sum)
    eps, eps32 = torch.finfo(tolerance.dtype).eps, torch.finfo(torch.float32).eps
    floor = (math.sqrt(stored) * eps + accumulated * eps32) / 2
    return factor * tolerance.twin_errors[name] + floor


def judge(
    results: Mapping[str, Tensor], tolerance: Tolerance, *, merges: int = 0, sent: int = 0
) -> tuple[Verdict, ...]:
    """Return a verdict on each tensor. Arguments as `errors` and `limit`."""
    return tuple(
        Verdict(name=name, error=error, limit=limit(name, tolerance, merges=merges, sent=sent))
        for name, error in errors(results, tolerance).items()
    )


def widest(verdicts: Iterable[Verdict]) -> dict[str, Verdict]:
    """Join verdicts on several inputs: by tensor, the largest error and the most that it may be."""
    found: dict[str, Verdict] = {}
    for new in verdicts:
        old = found.get(new.name, new)
        error, most = max(old.error, new.error), max(old.limit, new.limit)
        found[new.name] = Verdict(name=new.name, error=error, limit=most)
    return found


def _largest(x: Tensor) -> float:
    """Largest finite magnitude; 0 of an empty tensor."""
    if not x.numel():
        return 0.0
    largest = float(x.abs().max())
    if math.isfinite(largest):  # a NaN is the largest of all
        return largest
    finite = x[x.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _error(x: Tensor, ref: Tensor, scale: float) -> float:
    difference = torch.where(x == ref, 0.0, x.double() - ref)  # -inf where ref has it is right
    if not difference.isfinite().all():
        return math.inf
    largest = _largest(difference)
    if not scale:  # no query meets a key: only zeros are right
        return math.inf if largest else 0.0
    return largest / scale

"""Dense attention to compare with: the reference in float64, and a naive twin in low precision.

Shape suffix legend: B batch, H query heads, G key/value heads, S query tokens, T key tokens,
D head_dim of q and k, E head_dim of v. Nothing here is shared with the kernels under test, and no
fused operator is called: scores, softmax and gradients are written out, one (batch, head) at a
time, so that the largest tensor is `(S, T)`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Results: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Changes to scores besides scaling and masking; none by default.

    Attributes:
        softcap: Scores become `softcap * tanh(score / softcap)`; None = they stay.
        alibi: `(H,)`: then loses the slope of its head times |query - key|; None = nothing.
        sinks: `(H,)`: a logit of each head that takes part in the sum of exponentials and adds
            nothing to out; None = there is none.
    """

    softcap: float | None = None
    alibi: Tensor | None = None
    sinks: Tensor | None = None


UNCHANGED = Scores()
"""Scores as they are."""


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    scale: float,
    dout: Tensor | None = None,
    *,
    dlse: Tensor | None = None,
    scores: Scores = UNCHANGED,
) -> dict[str, Tensor]:
    """Attend in float64, whatever the dtype of the inputs.

    Args:
        q: `(B, H, S, D)`.
        k: `(B, G, T, D)`; query head h uses KV head `h // (H // G)`.
        v: `(B, G, T, E)`.
        allowed: Bool `(S, T)`: which query meets which key.
        scale: Factor of the scores.
        dout: Gradient of out, `(B, H, S, E)`; None = no backward.
        dlse: Gradient of lse, `(B, H, S)`; None = 0.
        scores: What else is done to the scores.

    Returns:
        "out" `(B, H, S, E)` and "lse" `(B, H, S)`, and with dout also "dq", "dk", "dv", with sinks
        "dsinks" `(H,)`; float64. A row that meets no key has out 0, takes no part in a gradient,
        and its lse is -inf or the sink.
    """
    return _dense(q, k, v, allowed, scale, dout, torch.float64, dlse, scores)


def naive_twin(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    scale: float,
    dout: Tensor | None = None,
    *,
    dlse: Tensor | None = None,
    scores: Scores = UNCHANGED,
) -> dict[str, Tensor]:
    """Do the same mathematics in the precision of the inputs, each step rounded to it.

    Its distance from `reference` is what the precision itself costs on these inputs; the tolerance
    of a kernel is built on it. Arguments and results as `reference`, in the dtype of q.
    """
    return _dense(q, k, v, allowed, scale, dout, q.dtype, dlse, scores)


@torch.no_grad()
def spreads(
    q: Tensor, k: Tensor, allowed: Tensor, scale: float, scores: Scores = UNCHANGED
) -> tuple[float, float]:
    """Return how concentrated the weights are: root sums of squares, by query and by key.

    Args:
        q: As in `reference`.
        k: As in `reference`.
        allowed: As in `reference`.
        scale: As in `reference`.
        scores: As in `reference`; sinks are left out, as if they had no weight.

    Returns:
        The largest `sqrt(sum_j p_ij^2)` over queries (1 = all weight on one key), and the largest
        `sqrt(sum_hi p_hij^2)` over keys, the sum running over all query heads that share the key.
    """
    one = k.new_ones((*k.shape[:3], 1))
    _check(q, k, one, allowed, None)
    by_query, by_key = 0.0, 0.0
    if 0 in (q.numel(), k.numel()):
        return by_query, by_key
    q, k = q.double(), k.double()
    group = q.shape[1] // k.shape[1]
    barred = ~allowed
    for b in range(k.shape[0]):
        for g in range(k.shape[1]):
            keys_T = torch.zeros(k.shape[2], dtype=torch.float64)
            for h in range(g * group, (g + 1) * group):
                scores_ST = _changed((q[b, h] @ k[b, g].T).mul_(scale), scores, h)
                scores_ST.masked_fill_(barred, -torch.inf)
                weights_ST = torch.softmax(scores_ST, dim=1).nan_to_num_(0.0)  # an empty row
                del scores_ST
                squares_ST = weights_ST.square_()
                by_query = max(by_query, float(squares_ST.sum(dim=1).max()) ** 0.5)
                keys_T += squares_ST.sum(dim=0).to(keys_T)
            by_key = max(by_key, float(keys_T.max()) ** 0.5)
    return by_query, by_key


@torch.no_grad()
def _dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    scale: float,
    dout: Tensor | None,
    dtype: torch.dtype,
    dlse: Tensor | None = None,
    scores: Scores = UNCHANGED,
) -> dict[str, Tensor]:
    _check(q, k, v, allowed, dout)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    batch, heads, seqlen = q.shape[:3]
    group = heads // k.shape[1] if k.shape[1] else 1
    result = {
        "out": q.new_zeros((batch, heads, seqlen, v.shape[3])),
        "lse": q.new_full((batch, heads, seqlen), -torch.inf),
    }
    if dout is not None:
        dout = dout.to(dtype)
        result |= {f"d{name}": torch.zeros_like(x) for name, x in (("q", q), ("k", k), ("v", v))}
        if scores.sinks is not None:
            result["dsinks"] = q.new_zeros(heads)
    if k.shape[2] == 0:
        return result
    barred = ~allowed
    for b in range(batch):
        for h in range(heads):
            g = h // group
            q_SD, k_TD, v_TE = q[b, h], k[b, g], v[b, g]
            # In place, for memory: of three matrices of queries x keys at once at the most.
            weights_ST = (q_SD @ k_TD.T).mul_(scale)
            slope_ST = None
            if scores.softcap is not None:  # what a capped score changes by
                slope_ST = 1 / torch.cosh(weights_ST / scores.softcap) ** 2
            weights_ST = _changed(weights_ST, scores, h)
            weights_ST.masked_fill_(barred, -torch.inf)
            top_S1 = weights_ST.amax(dim=1, keepdim=True)
            if scores.sinks is not None:
                top_S1 = top_S1.clamp_(min=float(scores.sinks[h].to(dtype)))
            top_S1 = torch.where(top_S1 == -torch.inf, 0.0, top_S1)
            weights_ST.sub_(top_S1).exp_()
            sums_S1 = weights_ST.sum(dim=1, keepdim=True)
            if scores.sinks is not None:
                sink_S1 = torch.exp(scores.sinks[h].to(dtype) - top_S1)
                sums_S1 = sums_S1 + sink_S1
            result["lse"][b, h] = (top_S1 + torch.log(sums_S1)).squeeze(1)
            weights_ST.div_(torch.where(sums_S1 > 0, sums_S1, 1.0))  # an empty row's are all 0
            out_SE = weights_ST @ v_TE
            result["out"][b, h] = out_SE
            if dout is None:
                continue
            dout_SE = dout[b, h]
            dscores_ST = dout_SE @ v_TE.T  # of the weights, until they are in
            delta_S1 = (weights_ST * dscores_ST).sum(dim=1, keepdim=True)
            if dlse is not None:
                delta_S1 = delta_S1 - dlse[b, h].to(dtype)[:, None]
            if scores.sinks is not None:
                result["dsinks"][h] -= (sink_S1 / sums_S1 * delta_S1).sum()
            dscores_ST.sub_(delta_S1).mul_(weights_ST).mul_(scale)
            if slope_ST is not None:
                dscores_ST.mul_(slope_ST)
            result["dq"][b, h] = dscores_ST @ k_TD
            result["dk"][b, g] += dscores_ST.T @ q_SD
            result["dv"][b, g] += weights_ST.T @ dout_SE
    return result


def _changed(scores_ST: Tensor, scores: Scores, head: int) -> Tensor:  # noqa: N803  # shape suffix
    """Cap scaled scores, then lower them by distance; may change them in place."""
    if scores.softcap is not None:
        scores_ST = scores.softcap * torch.tanh(scores_ST / scores.softcap)
    if scores.alibi is not None:
        scores_ST = scores_ST - _distance(scores_ST) * scores.alibi[head].to(scores_ST.dtype)
    return scores_ST


def _distance(scores_ST: Tensor) -> Tensor:  # noqa: N803  # shape suffix
    rows, cols = (torch.arange(size, dtype=torch.float64) for size in scores_ST.shape)
    return (rows[:, None] - cols).abs().to(scores_ST.dtype)


def layer(
    x: Tensor,
    weights: Mapping[str, Tensor],
    allowed: Tensor,
    scale: float,
    dy: Tensor,
    *,
    rotary: float | None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Run a dense attention layer and its backward, each step rounded to a dtype.

    q, k, v = x Wq^T, x Wk^T, x Wv^T by heads; q and k turned by their positions; y = out Wo.

    Args:
        x: `(B, S, M)`.
        weights: "w_q" and "w_o" `(H, D, M)` and `(H, E, M)`; "w_k" and "w_v" with G heads.
        allowed: Bool `(S, S)`.
        scale: Factor of the scores.
        dy: Gradient of y, `(B, S, M)`.
        rotary: Base of the rotary angles; None = not turned.
        dtype: Float64 for the reference, the inputs' for the naive twin.

    Returns:
        "y" and "dx" `(B, S, M)`, "dw_q", "dw_k", "dw_v", "dw_o" shaped as the weights; and of the
        attention inside "q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv" by heads, q, k and
        their gradients as turned.
    """
    x, dy = x.to(dtype), dy.to(dtype)
    w = {name: weight.to(dtype) for name, weight in weights.items()}
    r = {name: torch.einsum("bsm,hdm->bhsd", x, w[f"w_{name}"]) for name in ("q", "k", "v")}
    for name in ("q", "k"):
        r[name] = _turned(r[name], rotary)
    r["dout"] = torch.einsum("bsm,hdm->bhsd", dy, w["w_o"])
    r |= _dense(r["q"], r["k"], r["v"], allowed, scale, r["dout"], dtype)
    r["y"] = torch.einsum("bhsd,hdm->bsm", r["out"], w["w_o"])
    r["dw_o"] = torch.einsum("bhsd,bsm->hdm", r["out"], dy)
    r["dx"] = torch.zeros_like(x)
    for name in ("q", "k", "v"):
        grad = r[f"d{name}"]
        if name != "v":
            grad = _turned(grad, rotary, back=True)
        r["dx"] = r["dx"] + torch.einsum("bhsd,hdm->bsm", grad, w[f"w_{name}"])
        r[f"dw_{name}"] = torch.einsum("bhsd,bsm->hdm", grad, x)
    return r


def _turned(x: Tensor, base: float | None, *, back: bool = False) -> Tensor:
    """Turn pairs (x0, x1), (x2, x3), ... as complex numbers by position * base ** (-2 i / D)."""
    if base is None:
        return x
    seqlen, width = x.shape[2:]
    powers = torch.arange(width // 2, dtype=torch.float64) * (-2 / width)
    frequencies = torch.full_like(powers, base) ** powers
    angles = torch.arange(seqlen, dtype=torch.float64)[:, None] * frequencies
    turns = torch.polar(torch.ones_like(angles), -angles if back else angles)
    pairs = torch.view_as_complex(x.double().reshape(*x.shape[:3], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def _check(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, dout: Tensor | None) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        msg = f"oracle: {shapes} do not fit together"
        raise ValueError(msg)
    if q.shape[1] % max(k.shape[1], 1):
        msg = f"oracle: {shapes}: query heads must be a multiple of KV heads"
        raise ValueError(msg)
    if allowed.shape != (q.shape[2], k.shape[2]) or allowed.dtype != torch.bool:
        msg = (
            f"oracle: allowed {tuple(allowed.shape)} {allowed.dtype} must be bool (S, T); {shapes}"
        )
        raise ValueError(msg)
    if dout is not None and dout.shape != (*q.shape[:3], v.shape[3]):
        msg = f"oracle: dout {tuple(dout.shape)} must be shaped as out; {shapes}"
        raise ValueError(msg)

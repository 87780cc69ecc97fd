"""What `attention_layer` is given: checked on this rank, and named for all ranks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from harness.attention.agreement import Facts
from harness.attention.group import check_device
from harness.attention.inputs import as_autocast, check_alike, check_tensors, described, dtype_of
from harness.attention.parallel import ContextParallel
from harness.execute.rotary import Rotary, Turns, TurnsOf
from harness.execute.shards import positions_of
from harness.plan.problem import Problem
from harness.plan.sharding import Sharding

Maybe = torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """A call's tensors and how q and k are made of them.

    Attributes:
        x: This rank's tokens, `(B, local tokens, M)`.
        weights: w_q, w_k, w_v and w_o, as `attention_layer` has them.
        biases: Of q, k, v and y; None = none.
        norms: Weights of RMSNorm of q and k, `(D)`; None = not normed.
        norm_eps: What it adds to the mean of squares.
        rotary: How q and k are turned; None = not.
        positions: By what they are turned, `(local tokens)` or `(B, local tokens)`; None = by
            their positions in the whole sequence.
    """

    x: torch.Tensor
    weights: tuple[torch.Tensor, ...]
    biases: tuple[Maybe, Maybe, Maybe, Maybe]
    norms: tuple[Maybe, Maybe]
    norm_eps: float
    rotary: Rotary | None
    positions: Maybe

    @property
    def is_normed(self) -> bool:
        """Whether q or k is normed."""
        return self.norms != (None, None)

    @property
    def has_biases(self) -> bool:
        """Whether q, k or v has a bias."""
        return any(bias is not None for bias in self.biases[:3])

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """What must have one dtype, by the names of arguments."""
        sides = ("q", "k", "v", "o")
        biases = {f"b_{n}": b for n, b in zip(sides, self.biases, strict=True) if b is not None}
        weights = {f"w_{n}": w for n, w in zip(sides, self.weights, strict=True)}
        return {"x": self.x, **weights, **biases}

    @property
    def named_norms(self) -> dict[str, torch.Tensor]:
        """Weights of RMSNorm, by the names of arguments."""
        named = zip(("norm_q", "norm_k"), self.norms, strict=True)
        return {name: norm for name, norm in named if norm is not None}

    def in_autocast(self) -> "LayerInputs":
        """Cast as torch's own products do; norms stay, as they do there."""
        cast = as_autocast(self.named)
        biases = tuple(cast.get(f"b_{name}") for name in ("q", "k", "v", "o"))
        weights = tuple(cast[f"w_{name}"] for name in ("q", "k", "v", "o"))
        b_q, b_k, b_v, b_o = biases
        return replace(self, x=cast["x"], weights=weights, biases=(b_q, b_k, b_v, b_o))

    @property
    def beside(self) -> Facts:
        """What ranks must have in common and no plan of the layer says."""
        given = [*self.named, *self.named_norms]
        plain = len(given) == 5 and self.positions is None
        if plain and (self.rotary is None or self.rotary == Rotary(base=self.rotary.base)):
            return ()
        return (
            ("given", ", ".join(given)),
            ("norm_eps", str(self.norm_eps)),
            ("rotary", str(self.rotary)),
            ("positions", "of the whole sequence" if self.positions is None else "given"),
        )


def layer_problem(cp: ContextParallel, given: LayerInputs) -> Problem:
    """Check this rank's tensors, and name what all ranks' tensors ask for.

    Raises:
        UnsupportedError: There is no attention in this dtype, or no transport of this device.
        ValueError: A shape or dtype does not fit the others or `cp`.
    """
    check_tensors("attention_layer", given.named | given.named_norms)
    head_dim, head_dim_v = _head_dims(cp, given)
    _check_biases(given)
    _check_norms(given, head_dim)
    _check_positions(cp, given)
    check_alike("attention_layer", given.named)
    dtype = dtype_of("attention_layer", given.x)
    check_device(given.x.device, cp.group)
    return Problem(
        pattern=cp.pattern,
        heads_q=cp.heads_q,
        heads_kv=cp.heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        batch=given.x.shape[0],
        dtype=dtype,
        cp=cp.cp,
        hidden=given.x.shape[2],
        rotary=None if given.rotary is None else given.rotary.base,
    )


def _head_dims(cp: ContextParallel, given: LayerInputs) -> tuple[int, int]:
    x, weights = given.x, given.weights
    shapes = described(given.named)
    if x.dim() != 3 or any(w.dim() != 2 for w in weights):
        raise ValueError(f"attention_layer: {shapes}: x has three axes and weights have two")
    model, wide_q, wide_v = x.shape[2], weights[0].shape[0], weights[2].shape[0]
    head_dim, odd_q = divmod(wide_q, cp.heads_q)
    head_dim_v, odd_v = divmod(wide_v, cp.heads_kv)
    wanted = (
        (wide_q, model),
        (cp.heads_kv * head_dim, model),
        (wide_v, model),
        (model, cp.heads_q * head_dim_v),
    )
    tokens = cp.queries.tokens(cp.rank)
    if odd_q or odd_v or [tuple(w.shape) for w in weights] != list(wanted) or x.shape[1] != tokens:
        raise ValueError(
            f"attention_layer: {shapes}: rank {cp.rank} of {cp.cp} has {tokens} tokens; with "
            f"{cp.heads_q} query and {cp.heads_kv} KV heads weights are (heads_q D, M), "
            "(heads_kv D, M), (heads_kv E, M), (M, heads_q E)"
        )
    return head_dim, head_dim_v


def _check_biases(given: LayerInputs) -> None:
    for bias, weight in zip(given.biases, given.weights, strict=True):
        if bias is not None and tuple(bias.shape) != (weight.shape[0],):
            raise ValueError(
                f"attention_layer: {described(given.named)}: a bias has one axis, as long as the "
                "first of its weight"
            )


def _check_norms(given: LayerInputs, head_dim: int) -> None:
    norms = given.named_norms
    if any(
        tuple(norm.shape) != (head_dim,)
        or not norm.is_floating_point()
        or norm.device != given.x.device
        for norm in norms.values()
    ):
        raise ValueError(
            f"attention_layer: {described(norms)}: norms are of each head by itself, ({head_dim},) "
            f"numbers on {given.x.device}"
        )
    if norms and not 0 <= given.norm_eps < math.inf:
        raise ValueError(
            f"attention_layer: norm_eps ({given.norm_eps}) must be a number of at least 0"
        )


def _check_positions(cp: ContextParallel, given: LayerInputs) -> None:
    at, tokens = given.positions, cp.queries.tokens(cp.rank)
    if at is None:
        return
    if given.rotary is None:
        raise ValueError("attention_layer: positions are those of rotary, which is not given")
    check_tensors("attention_layer", {"positions": at})
    shapes = ((tokens,), (1, tokens), (given.x.shape[0], tokens))
    if tuple(at.shape) not in shapes or at.is_floating_point() or at.dtype is torch.bool:
        raise ValueError(
            f"attention_layer: {described({'positions': at})}: whole numbers, ({tokens},) or "
            f"{shapes[2]} on rank {cp.rank}; cut those of all tokens with shard(..., dim=-1)"
        )


def turns_of(given: LayerInputs, problem: Problem, owners: Sharding, rank: int) -> TurnsOf | None:
    """Return how tokens of this rank turn, by their places in the whole sequence; None = not."""
    rotary, device = given.rotary, given.x.device
    if rotary is None:
        return None
    at = _places if given.positions is None else _found_in(given.positions, owners, rank)

    def turns(chunks: Sequence[range]) -> Turns:
        return rotary.turns(at(chunks), problem.head_dim, device)

    return turns


def _places(chunks: Sequence[range]) -> torch.Tensor:
    return positions_of(chunks, torch.device("cpu"))


def _found_in(
    positions: torch.Tensor, owners: Sharding, rank: int
) -> Callable[[Sequence[range]], torch.Tensor]:
    """Look given positions up by the places of tokens in the whole sequence."""
    owned = owners.owned[rank]
    places, order = _places([owners.chunks[c] for c in owned]).sort()
    by_row = positions[:, None] if positions.dim() == 2 else positions  # (B, 1, S) or (S)

    def at(chunks: Sequence[range]) -> torch.Tensor:
        rows = order[torch.searchsorted(places, _places(chunks))]
        return by_row[..., rows.to(by_row.device)]

    return at

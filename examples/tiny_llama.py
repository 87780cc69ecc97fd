"""Train a tiny Llama over ranks, with any strategy, and see that nothing changes but where it runs.

    .venv/bin/torchrun --nproc-per-node 2 examples/tiny_llama.py
    .venv/bin/torchrun --nproc-per-node 4 examples/tiny_llama.py --dtype float32 \
        --strategies zigzag upipe:checkpoint=layer,offload=true

Two blocks of RMSNorm, attention with rotary positions and grouped heads, and SwiGLU; next-token
loss; AdamW. Each rank holds its tokens of every sequence and all weights. Every strategy trains the
same model on the same tokens; one process alone, with attention written out densely and nothing of
this project, says what the loss must be. The differences at the end of the run are those of adding
in another order.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from harness.attention import ContextParallel, attention_layer, context_parallel
from strategies import EVERY_STRATEGY

LIMITS = {"float64": 1e-9, "float32": 1e-4}
"""How far the losses of 20 steps may be from those of one process."""

ROTARY = 5e5


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model and of its batch; no two are equal, and ranks divide no length."""

    vocabulary: int = 61
    hidden: int = 20
    heads_q: int = 8
    heads_kv: int = 2
    head_dim: int = 6
    inner: int = 44
    blocks: int = 2
    batch: int = 3
    seqlen: int = 53


Attend = Callable[[torch.Tensor, "Attention"], torch.Tensor]
"""From the normed tokens and a block's weights to what attention adds."""


class Attention(nn.Module):
    """The weights of attention; who computes it is given."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        wide_q, wide_kv = shape.heads_q * shape.head_dim, shape.heads_kv * shape.head_dim
        self.q = nn.Linear(shape.hidden, wide_q, bias=False)
        self.k = nn.Linear(shape.hidden, wide_kv, bias=False)
        self.v = nn.Linear(shape.hidden, wide_kv, bias=False)
        self.o = nn.Linear(wide_q, shape.hidden, bias=False)


class Block(nn.Module):
    """x + attention(norm(x)), then + SwiGLU(norm(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before_attention = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.attention = Attention(shape)
        self.before_inner = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Of tokens `(B, S, M)`."""
        x = x + attend(self.before_attention(x), self.attention)
        h = self.before_inner(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = nn.RMSNorm(shape.hidden, eps=1e-5)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, attend: Attend) -> torch.Tensor:
        """From ids `(B, S)` to scores `(B, S, vocabulary)`."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, attend)
        return self.head(self.norm(x))


def spread(cp: ContextParallel) -> Attend:
    """Attention over ranks."""

    def attend(x: torch.Tensor, a: Attention) -> torch.Tensor:
        weights = (a.q.weight, a.k.weight, a.v.weight, a.o.weight)
        return attention_layer(cp, x, *weights, rotary=ROTARY)

    return attend


def dense(shape: Shape) -> Attend:
    """Attention in one process, written out."""

    def turned(x: torch.Tensor) -> torch.Tensor:
        """Turn neighbouring pairs by their positions (arXiv:2104.09864, section 3.2.2)."""
        powers = torch.arange(shape.head_dim // 2, dtype=torch.float64) * (-2 / shape.head_dim)
        angles = torch.outer(torch.arange(x.shape[2], dtype=torch.float64), ROTARY**powers)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.unflatten(3, (-1, 2)).unbind(4)
        pairs = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=4)
        return pairs.flatten(3)

    def attend(x: torch.Tensor, a: Attention) -> torch.Tensor:
        q, k, v = (
            made(x).unflatten(2, (-1, shape.head_dim)).transpose(1, 2) for made in (a.q, a.k, a.v)
        )
        group = shape.heads_q // shape.heads_kv
        k, v = turned(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = turned(q) @ k.mT / shape.head_dim**0.5
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        out = scores.masked_fill(later, -torch.inf).softmax(3) @ v
        return a.o(out.transpose(1, 2).flatten(2))

    return attend


def data(shape: Shape, steps: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    """Per step, tokens and the tokens that follow them: counting in strides, with some noise."""
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        start = torch.randint(shape.vocabulary, (shape.batch, 1), generator=draw)
        stride = torch.randint(1, 4, (shape.batch, 1), generator=draw)
        whole = start + stride * torch.arange(shape.seqlen + 1)
        noise = torch.rand(whole.shape, generator=draw) < 0.05
        whole = torch.where(noise, whole + 7, whole) % shape.vocabulary
        yield whole[:, :-1], whole[:, 1:]


def train(
    strategy: str | None, dtype: torch.dtype, steps: int = 20, shape: Shape | None = None
) -> list[float]:
    """Train and return the loss of each step, over all tokens.

    Args:
        strategy: Over the ranks of the default group; None = in this process alone, densely.
        dtype: Of weights, activations and optimizer.
        steps: How many.
        shape: Sizes; None = the default ones.
    """
    shape = shape or Shape()
    torch.manual_seed(0)  # every rank starts with the same weights
    model = Llama(shape).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cp = None
    if strategy is not None:
        heads = {"heads_q": shape.heads_q, "heads_kv": shape.heads_kv}
        cp = context_parallel(strategy=strategy, seqlen=shape.seqlen, **heads)
    losses = []
    attend = dense(shape) if cp is None else spread(cp)
    for whole in data(shape, steps):
        # The next token of each token is known before tokens are dealt to ranks.
        tokens, following = whole if cp is None else (cp.shard(ids, dim=1) for ids in whole)
        scores = model(tokens, attend).flatten(0, 1)
        total = nn.functional.cross_entropy(scores, following.flatten(), reduction="sum")
        # The mean over all tokens, so that ranks with more of them weigh more.
        loss = total / (shape.batch * shape.seqlen)
        optimizer.zero_grad()
        loss.backward()
        value = loss.detach()
        if cp is not None and cp.group is not None:
            sums = [value, *(p.grad for p in model.parameters() if p.grad is not None)]
            for each in sums:
                dist.all_reduce(each)
        optimizer.step()
        losses.append(float(value))
    return losses


def furthest(losses: Sequence[float], alone: Sequence[float]) -> float:
    """The largest difference of two loss curves."""
    return max(abs(a - b) for a, b in zip(losses, alone, strict=True))


def main() -> int:
    """Train with each strategy and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", nargs="+", default=[*EVERY_STRATEGY], help="default: all")
    parser.add_argument("--dtype", choices=[*LIMITS], default="float64")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    dtype, limit = getattr(torch, args.dtype), LIMITS[args.dtype]
    alone, failed = train(None, dtype, args.steps), 0
    lines = [f"one process: loss {alone[0]:.4f} to {alone[-1]:.4f} in {args.steps} steps"]
    for strategy in args.strategies:
        losses = train(strategy, dtype, args.steps)
        off = furthest(losses, alone)
        failed += not off <= limit
        lines.append(f"{strategy:24} off by {off:.1e}, at most {limit:.0e} is right")
    if rank == 0:
        print("\n".join(lines))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

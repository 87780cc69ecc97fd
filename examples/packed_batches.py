"""Train on packed documents over ranks, a new packing every step, and lose what one process does.

    .venv/bin/torchrun --nproc-per-node 2 examples/packed_batches.py
    .venv/bin/torchrun --nproc-per-node 4 examples/packed_batches.py --strategies dynamic zigzag

Each step packs other documents side by side into one sequence. Tokens see their own document only,
positions (embedded and rotary) restart with each, and the loss counts some tokens only: those
behind a prompt that have a next token. `for_pattern` is the cheap way from one packing to the next:
who computes what is planned and proved again, everything else stays. One process that takes every
document by itself, with attention written out densely and nothing of this project, says what losses
and gradients must be.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
import torch.distributed as dist
from torch import nn

from harness.attention import ContextParallel, context_parallel, documents_of

STRATEGIES = ("zigzag", "allgather:placement=balanced", "dynamic", "dynamic:rule=megatron")
LIMIT = 1e-9
"""How far losses and gradients may be from those of one process, float64."""

VOCABULARY, HIDDEN, HEADS_Q, HEADS_KV, HEAD_DIM = 61, 20, 6, 2, 8
SEQLEN, PADDING = 131, 5
ROTARY = 5e5

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From q, k and v `(B, H, S, D)` to out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One packed sequence, padded at its end.

    Attributes:
        lengths: Tokens of each document.
        tokens: Ids, `(1, SEQLEN)`.
        following: The next id of each token, where the loss counts it.
        counted: 1 where the loss counts a token, else 0.
    """

    lengths: tuple[int, ...]
    tokens: torch.Tensor
    following: torch.Tensor
    counted: torch.Tensor


def batches(steps: int) -> Iterator[Batch]:
    """Draw packings of documents that count in strides; a third of each is a prompt."""
    draw = Random(3)
    for _ in range(steps):
        lengths, room = [], SEQLEN - PADDING
        while room:
            lengths.append(min(draw.choice((3, 9, 17, 64)), room))
            room -= lengths[-1]
        tokens = torch.zeros(1, SEQLEN, dtype=torch.int64)
        counted = torch.zeros(1, SEQLEN, dtype=torch.float64)
        start = 0
        for length in lengths:
            first, stride = draw.randrange(VOCABULARY), draw.choice((1, 2))
            tokens[0, start : start + length] = (first + stride * torch.arange(length)) % VOCABULARY
            # The last token of a document has no next one; the next document's first is none.
            counted[:, start + length // 3 : start + length - 1] = 1
            start += length
        yield Batch(
            lengths=tuple(lengths), tokens=tokens, following=tokens.roll(-1, 1), counted=counted
        )


class Model(nn.Module):
    """Embeddings of ids and positions, attention with rotary positions and grouped heads, head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.places = nn.Embedding(SEQLEN, HIDDEN)
        self.q = nn.Linear(HIDDEN, HEADS_Q * HEAD_DIM, bias=False)
        self.k = nn.Linear(HIDDEN, HEADS_KV * HEAD_DIM, bias=False)
        self.v = nn.Linear(HIDDEN, HEADS_KV * HEAD_DIM, bias=False)
        self.o = nn.Linear(HEADS_Q * HEAD_DIM, HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """From ids `(B, S)` and their positions `(S,)` to scores `(B, S, vocabulary)`."""
        x = self.embedding(tokens) + self.places(positions)
        q, k, v = (
            made(x).unflatten(2, (-1, HEAD_DIM)).transpose(1, 2)
            for made in (self.q, self.k, self.v)
        )
        out = attend(turned(q, positions), turned(k, positions), v)
        return self.head(x + self.o(out.transpose(1, 2).flatten(2)))


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn neighbouring pairs by their positions (arXiv:2104.09864, section 3.2.2)."""
    powers = torch.arange(HEAD_DIM // 2, dtype=torch.float64) * (-2 / HEAD_DIM)
    angles = torch.outer(positions.double(), ROTARY**powers)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.unflatten(3, (-1, 2)).unbind(4)
    pairs = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=4)
    return pairs.flatten(3)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of one document, written out."""
    group = HEADS_Q // HEADS_KV
    scores = q @ k.repeat_interleave(group, 1).mT / HEAD_DIM**0.5
    later = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(3) @ v.repeat_interleave(group, 1)


def lost(scores: torch.Tensor, following: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Sum the loss of the counted tokens."""
    each = nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten(), reduction="none")
    return (each * counted.flatten()).sum()


def loss_alone(model: Model, batch: Batch) -> torch.Tensor:
    """Sum the losses of the documents, one after another."""
    total, start = torch.zeros((), dtype=torch.float64), 0
    for length in batch.lengths:
        here = slice(start, start + length)
        scores = model(batch.tokens[:, here], torch.arange(length), dense)
        total = total + lost(scores, batch.following[:, here], batch.counted[:, here])
        start += length
    return total


def loss_here(model: Model, batch: Batch, cp: ContextParallel) -> torch.Tensor:
    """Sum the losses of this rank's tokens of the packed sequence."""
    tokens, following, counted = (
        cp.shard(each, dim=1) for each in (batch.tokens, batch.following, batch.counted)
    )
    scores = model(tokens, cp.document_positions, cp.attend)
    return lost(scores, following, counted)


@dataclass(frozen=True, slots=True)
class Trained:
    """Losses of all steps, and the gradients of all weights in each.

    Attributes:
        losses: Mean over the counted tokens of a batch.
        gradients: Of each step, all weights' in a row.
    """

    losses: tuple[float, ...]
    gradients: tuple[torch.Tensor, ...]

    def off(self, other: "Trained") -> float:
        """The largest difference of a loss or a gradient."""
        losses = [abs(a - b) for a, b in zip(self.losses, other.losses, strict=True)]
        pairs = zip(self.gradients, other.gradients, strict=True)
        return max(*losses, *(float((a - b).abs().max()) for a, b in pairs))


def train(strategy: str | None, steps: int = 6) -> Trained:
    """Train, a new packing every step.

    Args:
        strategy: Over the ranks of the default group; None = in this process alone.
        steps: How many.
    """
    torch.manual_seed(0)  # every rank starts with the same weights
    model = Model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    base = None
    if strategy is not None:
        shape = {"seqlen": SEQLEN, "heads_q": HEADS_Q, "heads_kv": HEADS_KV}
        base = context_parallel(strategy=strategy, **shape)
    losses, gradients = [], []
    for batch in batches(steps):
        cp = None
        if base is not None:
            cp = base.for_pattern(documents_of(lengths=batch.lengths, seqlen=SEQLEN))
            # A loader can do this ahead, in a thread, while the step before runs.
            cp.prepare(head_dim=HEAD_DIM, dtype=torch.float64)
        total = loss_alone(model, batch) if cp is None else loss_here(model, batch, cp)
        # The mean over the counted tokens of all ranks, of which some may have none.
        loss = total / batch.counted.sum()
        optimizer.zero_grad()
        loss.backward()
        weights = [p for p in model.parameters() if p.grad is not None]
        value = loss.detach()
        if cp is not None and cp.group is not None:
            for each in (value, *(p.grad for p in weights)):
                dist.all_reduce(each)
        gradients.append(torch.cat([p.grad.flatten() for p in weights]))
        optimizer.step()
        losses.append(float(value))
    return Trained(tuple(losses), tuple(gradients))


def main(arguments: Sequence[str] | None = None) -> int:
    """Train with each strategy and compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--strategies", nargs="+", default=[*STRATEGIES], help="names")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    alone, failed = train(None, args.steps), 0
    lines = [f"one process: loss {alone.losses[0]:.4f} to {alone.losses[-1]:.4f}"]
    for strategy in args.strategies:
        off = train(strategy, args.steps).off(alone)
        failed += not off <= LIMIT
        lines.append(f"{strategy:30} off by {off:.1e}, at most {LIMIT:.0e} is right")
    if rank == 0:
        print("\n".join(lines))
    if dist.is_initialized():
        dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

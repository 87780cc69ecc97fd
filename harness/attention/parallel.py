"""Attention over a sequence that is spread over ranks, for a user's own model.

    cp = context_parallel(strategy="zigzag", pattern="causal", seqlen=4099, heads_q=32, heads_kv=8)
    x = cp.shard(x, dim=1)                        # this rank's tokens, before the model
    rope = cos[cp.positions], sin[cp.positions]   # rotary positions are those of the whole sequence
    out = cp.attend(q, k, v)                      # (B, H, local tokens, D); gradients flow

A model that makes no such value calls `attention` on its shards. Whatever goes by neighbouring
tokens (labels that are shifted by one, a convolution) is done before `shard`: a rank's tokens need
not be neighbours.

Every rank of the group makes the same calls in the same order, forward and backward, with the same
arguments. Each call compares them over the ranks before anything moves: where ranks differ, or one
refuses, all are told in what and none waits in vain.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import strategies
from harness.attention.agreement import Word, compare, digest_of, telling
from harness.attention.autograd import attend
from harness.attention.call import Call
from harness.attention.compiling import outside_graphs
from harness.attention.group import check_device, seat
from harness.attention.inputs import (
    as_autocast,
    check_alike,
    check_name,
    check_tensors,
    described,
    dtype_of,
    refuse_dropout,
)
from harness.attention.layout import owners_of
from harness.errors import UnsupportedError
from harness.plan.problem import Problem
from harness.plan.sharding import Sharding
from harness.planning.chosen import Chosen
from harness.planning.strategy import Context
from harness.proved.plans import Owners
from patterns import PATTERNS, Pattern, make_pattern
from patterns.kind import integer


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel:
    """One way to spread attention over the ranks of a group; made by `context_parallel`.

    Attributes:
        strategy: Who computes what and who sends what.
        pattern: Which query positions attend which key positions; carries the lengths.
        heads_q: Query heads.
        heads_kv: Key/value heads.
        rank: This rank in the group.
        cp: Ranks in the group.
        queries: Who owns which query tokens.
        keys: Who owns which key tokens; equal to `queries` for self-attention.
        context: Facts of the cluster for the planner.
        group: The process group; None = this process is alone.
    """

    strategy: Chosen
    pattern: Pattern
    heads_q: int
    heads_kv: int
    rank: int
    cp: int
    queries: Sharding
    keys: Sharding
    context: Context = field(repr=False)
    group: dist.ProcessGroup | None = field(repr=False)

    def __copy__(self) -> "ContextParallel":
        """Return the value itself: nothing in it changes."""
        return self

    def __deepcopy__(self, memo: object) -> "ContextParallel":
        """Return the value itself, with its group."""
        return self

    def __reduce__(self) -> tuple[Callable[..., "ContextParallel"], tuple[object, ...]]:
        """Pickle the arguments; loading makes it again, on the default group.

        Raises:
            UnsupportedError: Its group is another, which no process can make again alone.
        """
        if self.group is not None and self.group is not dist.group.WORLD:
            ranks = dist.get_process_group_ranks(self.group)
            raise UnsupportedError(
                f"ContextParallel: its group is that of ranks {ranks}, which who loads it cannot "
                "make alone",
                ("saving the model's state_dict()", "context_parallel(...) after loading"),
            )
        made_of = (self.strategy.text, self.pattern, self.heads_q, self.heads_kv, self.context)
        return _made_again, made_of

    @property
    def owners(self) -> Owners:
        """Who owns which query tokens, and which key tokens."""
        return self.queries, self.keys

    @property
    def positions(self) -> torch.Tensor:
        """Positions of this rank's query tokens in the whole sequence, int64, in local order."""
        return _positions(self.queries, self.rank)

    @property
    def key_positions(self) -> torch.Tensor:
        """As `positions`, for keys; the same for self-attention."""
        return _positions(self.keys, self.rank)

    def sharding(self, *, keys: bool = False) -> Sharding:
        """Return who owns which query tokens, or key tokens."""
        return self.keys if keys else self.queries

    def shard(self, whole: torch.Tensor, *, dim: int = 2, keys: bool = False) -> torch.Tensor:
        """Take this rank's tokens out of a tensor that every rank has; gradients flow.

        Args:
            whole: Any tensor with all tokens along `dim`, in their original order.
            dim: The token axis: 2 for `(B, H, S, D)`, 1 for ids `(B, S)`.
            keys: Take key tokens, where they differ from query tokens.

        Raises:
            ValueError: The axis is not as long as the sequence.
        """
        sharding = self.sharding(keys=keys)
        total = sum(map(len, sharding.chunks))
        if whole.shape[dim] != total:
            raise ValueError(
                f"shard: axis {dim} of {tuple(whole.shape)} must hold the {total} tokens of the "
                "whole sequence; choose another dim"
            )
        positions = self.key_positions if keys else self.positions
        return whole.index_select(dim, positions.to(whole.device))

    @outside_graphs
    def unshard(self, part: torch.Tensor, *, dim: int = 2, keys: bool = False) -> torch.Tensor:
        """Gather every rank's tokens and put them back into their original order.

        For logs, checks and sampling: no gradient passes. A collective: every rank calls it.

        Args:
            part: This rank's tokens along `dim`, in local order.
            dim: The token axis.
            keys: The tokens are key tokens, where they differ from query tokens.

        Raises:
            ValueError: The axis is not as long as this rank's part, or a gradient would be lost.
        """
        sharding = self.sharding(keys=keys)
        tokens = sharding.tokens(self.rank)
        with telling(self.group):
            if part.shape[dim] != tokens:
                raise ValueError(
                    f"unshard: axis {dim} of {tuple(part.shape)} must hold the {tokens} tokens of "
                    f"rank {self.rank}; choose another dim"
                )
            if part.requires_grad and torch.is_grad_enabled():
                raise ValueError("unshard: no gradient passes it; give it part.detach()")
        first = part.movedim(dim, 0)
        whole = first.new_empty((sum(map(len, sharding.chunks)), *first.shape[1:]))
        for rank, tensor in enumerate(self._gather(first, sharding)):
            whole[_positions(sharding, rank).to(whole.device)] = tensor
        return whole.movedim(0, dim).contiguous()

    @outside_graphs
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, dropout_p: float = 0.0
    ) -> torch.Tensor:
        """Attend from this rank's queries to all keys. A collective, forward and backward.

        The scores are scaled by `D ** -0.5`; scale q beforehand for another factor. The backward
        pass needs every rank's: a rank whose loss leaves its output out makes the others wait.

        Args:
            q: `(B, heads_q, local query tokens, D)`.
            k: `(B, heads_kv, local key tokens, D)`.
            v: `(B, heads_kv, local key tokens, E)`.
            dropout_p: Must be 0.

        Returns:
            `(B, heads_q, local query tokens, E)`, in the dtype of q; under autocast in autocast's,
            as torch's own attention.

        Raises:
            UnsupportedError: Dropout, a transform of torch.func, or a dtype or device without
                attention or transport is asked for; or the strategy cannot do this problem; and,
                from backward, a gradient of the gradient.
            ValueError: A shape, dtype or device does not fit the others or this value.
            PlanError: The ranks make different calls.
        """
        with telling(self.group):
            refuse_dropout(dropout_p)
            named = {"q": q, "k": k, "v": v}
            check_tensors("attention", named)
            q, k, v = as_autocast(named).values()
            problem = self._problem(q, k, v)
        return attend(q, k, v, self.call(problem))

    def call(self, problem: Problem) -> Call:
        """Return one call of the ranks, for what their tensors ask for."""
        return Call(
            strategy=self.strategy,
            problem=problem,
            context=self.context,
            owners=self.owners,
            rank=self.rank,
            group=self.group,
        )

    def _gather(self, part: torch.Tensor, sharding: Sharding) -> list[torch.Tensor]:
        """Every rank's part, along the first axis; parts are padded on the way to equal lengths."""
        if self.group is None:
            return [part]
        facts = (
            ("call", "unshard"),
            ("dtype", str(part.dtype)),
            ("shape but for tokens", str(tuple(part.shape[1:]))),
            ("tokens of each rank", str([*map(sharding.tokens, range(self.cp))])),
        )
        compare(self.group, Word.GATHER, facts, digest_of(facts))
        tokens = [sharding.tokens(rank) for rank in range(self.cp)]
        padded = part.new_zeros((max(tokens), *part.shape[1:]))
        padded[: len(part)] = part.detach()
        parts = [torch.empty_like(padded) for _ in tokens]
        dist.all_gather(parts, padded, group=self.group)
        return [gathered[:count] for gathered, count in zip(parts, tokens, strict=True)]

    def _problem(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Problem:
        """Check this rank's tensors, and name what all ranks' tensors ask for."""
        named = {"q": q, "k": k, "v": v}
        if not (q.dim() == k.dim() == v.dim() == 4):
            raise ValueError(
                f"attention: {described(named)}: each must be (B, heads, local tokens, D)"
            )
        check_alike("attention", named)
        wanted = (
            ("q", q, self.heads_q, self.queries, q.shape[3]),
            ("k", k, self.heads_kv, self.keys, q.shape[3]),
            ("v", v, self.heads_kv, self.keys, v.shape[3]),
        )
        for name, x, heads, sharding, wide in wanted:
            shape = (q.shape[0], heads, sharding.tokens(self.rank), wide)
            if tuple(x.shape) != shape:
                raise ValueError(
                    f"attention: {described(named)}: rank {self.rank} of {self.cp} under "
                    f"{self.strategy.text} needs {name} {shape}; cut it with shard"
                )
        dtype = dtype_of("attention", q)
        check_device(q.device, self.group)
        return Problem(
            pattern=self.pattern,
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            head_dim=q.shape[3],
            head_dim_v=v.shape[3],
            batch=q.shape[0],
            dtype=dtype,
            cp=self.cp,
        )


def _positions(sharding: Sharding, rank: int) -> torch.Tensor:
    """Positions of a rank's tokens; on the CPU, whatever the default device is."""
    return torch.tensor(sharding.positions(rank), dtype=torch.int64, device="cpu")


@outside_graphs
def context_parallel(
    *,
    seqlen: int,
    heads_q: int,
    heads_kv: int | None = None,
    strategy: str = strategies.DEFAULT,
    pattern: str | Pattern = "causal",
    seqlen_kv: int | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    context: Context | None = None,
) -> ContextParallel:
    """Choose how the ranks of a group share attention. Communicates nothing.

    Args:
        seqlen: Tokens of the whole sequence; any number, also fewer than ranks.
        heads_q: Query heads of the model.
        heads_kv: Its key/value heads; None = as many as query heads.
        strategy: Name with options, such as `usp:4x2`; see `strategies`.
        pattern: Name with parameters, such as `window:left=128`, or a pattern; see `patterns`.
        seqlen_kv: Key tokens, for cross-attention; None = `seqlen`.
        group: The ranks: a process group, or a mesh of one axis such as `mesh["cp"]`; None = the
            default group, or this process alone without one.
        context: Facts of the cluster for the planner.

    Raises:
        UnsupportedError: The strategy cannot do this; says why and what is near.
        ValueError: A name, option, parameter or number is wrong, or this process is not in group.
    """
    group, rank, cp = seat(group)
    check_name("strategy", strategy, strategies.STRATEGIES)
    seqlen = integer("seqlen", seqlen)
    keys = seqlen if seqlen_kv is None else integer("seqlen_kv", seqlen_kv)
    if not isinstance(pattern, Pattern):
        check_name("pattern", pattern, PATTERNS)
        pattern = make_pattern(pattern, seqlen, keys, cross=keys != seqlen)
    if (pattern.seqlen_q, pattern.seqlen_kv) != (seqlen, keys):
        raise ValueError(
            f"pattern {pattern.text} is {pattern.seqlen_q} x {pattern.seqlen_kv} tokens, which "
            f"must equal seqlen ({seqlen}) x seqlen_kv ({keys})"
        )
    chosen, context = strategies.strategy(strategy), context or Context()
    shape = Problem(
        pattern=pattern,
        heads_q=heads_q,
        heads_kv=heads_q if heads_kv is None else heads_kv,
        head_dim=1,
        cp=cp,
    )
    queries, own_keys = owners_of(chosen, shape, context)
    return ContextParallel(
        strategy=chosen,
        pattern=pattern,
        heads_q=shape.heads_q,
        heads_kv=shape.heads_kv,
        rank=rank,
        cp=cp,
        queries=queries,
        keys=own_keys,
        context=context,
        group=group,
    )


def _made_again(
    strategy: str, pattern: Pattern, heads_q: int, heads_kv: int, context: Context
) -> ContextParallel:
    """Make it from the pickled arguments, for the default group of this process."""
    return context_parallel(
        seqlen=pattern.seqlen_q,
        seqlen_kv=pattern.seqlen_kv,
        heads_q=heads_q,
        heads_kv=heads_kv,
        strategy=strategy,
        pattern=pattern,
        context=context,
    )

"""Attention over a sequence that is spread over ranks, for a user's own model.

    cp = context_parallel(strategy="zigzag", pattern="causal", seqlen=4099, heads_q=32, heads_kv=8)
    x = cp.shard(x, dim=1)                        # this rank's tokens, before the model
    rope = cos[cp.positions], sin[cp.positions]   # rotary positions are those of the whole sequence
    out = cp.attend(q, k, v)                      # (B, H, local tokens, D); gradients flow

A model that makes no such value calls `attention` on its shards. Whatever goes by neighbouring
tokens (labels that are shifted by one, a convolution) is done before `shard`: a rank's tokens need
not be neighbours.

Every rank of the group makes the same calls in the same order, forward and backward, with the same
arguments. What a rank can see by itself it refuses at once. Before a plan first runs in a group its
hash is compared, so that ranks with different plans are told and do not wait in vain.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import strategies
from harness.attention.agreement import (
    Ready,
    agreed,
    check_device,
    exchange,
    planned,
    run_plan,
    seat,
    transport_of,
)
from harness.errors import UnsupportedError
from harness.execute import shards
from harness.execute.transport import LocalTransport, Transport
from harness.plan import heads as head_sets
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.residency import Program
from harness.plan.sharding import Sharding
from harness.plan.tasks import Piece, Place, Resident, Tensor
from harness.planning.chosen import Chosen
from harness.planning.strategy import Context
from harness.proved.plans import Owners
from patterns import Pattern, make_pattern

_DTYPE_OF = {getattr(torch, dtype.value): dtype for dtype in Dtype}


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
        context: What the planner knows of the cluster.
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

    @property
    def owners(self) -> Owners:
        """Who owns which query tokens, and which key tokens."""
        return self.queries, self.keys

    @property
    def positions(self) -> torch.Tensor:
        """Positions of this rank's query tokens in the whole sequence, int64, in local order."""
        return torch.tensor(self.queries.positions(self.rank), dtype=torch.int64)

    @property
    def key_positions(self) -> torch.Tensor:
        """As `positions`, for keys; the same for self-attention."""
        return torch.tensor(self.keys.positions(self.rank), dtype=torch.int64)

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
        if part.shape[dim] != tokens:
            raise ValueError(
                f"unshard: axis {dim} of {tuple(part.shape)} must hold the {tokens} tokens of rank "
                f"{self.rank}; choose another dim"
            )
        if part.requires_grad and torch.is_grad_enabled():
            raise ValueError("unshard: no gradient passes it; give it part.detach()")
        first = part.movedim(dim, 0)
        whole = first.new_empty((sum(map(len, sharding.chunks)), *first.shape[1:]))
        for rank, tensor in enumerate(self._gather(first, sharding)):
            mine = torch.tensor(sharding.positions(rank), dtype=torch.int64, device=whole.device)
            whole[mine] = tensor
        return whole.movedim(0, dim).contiguous()

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
            `(B, heads_q, local query tokens, E)`, in the dtype of q.

        Raises:
            UnsupportedError: Dropout, tracing by torch.compile, or a dtype or device without
                attention or transport is asked for; or the strategy cannot do this problem; and,
                from backward, a gradient of the gradient.
            ValueError: A shape, dtype or device does not fit the others or this value.
            PlanError: The ranks plan different things.
        """
        _refuse(dropout_p)
        problem = self._problem(q, k, v)
        out: torch.Tensor = _Attention.apply(q, k, v, Call(self, problem))  # type: ignore[no-untyped-call]  # torch: no annotations
        return out

    def _gather(self, part: torch.Tensor, sharding: Sharding) -> list[torch.Tensor]:
        """Every rank's part, along the first axis; parts are padded on the way to equal lengths."""
        if self.group is None:
            return [part]
        tokens = [sharding.tokens(rank) for rank in range(self.cp)]
        padded = part.new_zeros((max(tokens), *part.shape[1:]))
        padded[: len(part)] = part.detach()
        parts = [torch.empty_like(padded) for _ in tokens]
        dist.all_gather(parts, padded, group=self.group)
        return [gathered[:count] for gathered, count in zip(parts, tokens, strict=True)]

    def _problem(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Problem:
        """Check this rank's tensors, and name what all ranks' tensors ask for."""
        shapes = ", ".join(
            f"{name} {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} {x.device}"
            for name, x in (("q", q), ("k", k), ("v", v))
        )
        if not (q.dim() == k.dim() == v.dim() == 4):
            raise ValueError(f"attention: {shapes}: each must be (B, heads, local tokens, D)")
        if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
            raise ValueError(f"attention: {shapes}: dtype and device must be one")
        wanted = (
            ("q", q, self.heads_q, self.queries, q.shape[3]),
            ("k", k, self.heads_kv, self.keys, q.shape[3]),
            ("v", v, self.heads_kv, self.keys, v.shape[3]),
        )
        for name, x, heads, sharding, wide in wanted:
            shape = (q.shape[0], heads, sharding.tokens(self.rank), wide)
            if tuple(x.shape) != shape:
                raise ValueError(
                    f"attention: {shapes}: rank {self.rank} of {self.cp} under "
                    f"{self.strategy.text} needs {name} {shape}; cut it with shard"
                )
        if q.dtype not in _DTYPE_OF:
            raise UnsupportedError(
                f"attention: there is no attention in {q.dtype}", tuple(map(str, _DTYPE_OF))
            )
        check_device(q.device, self.group)
        return Problem(
            pattern=self.pattern,
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            head_dim=q.shape[3],
            head_dim_v=v.shape[3],
            batch=q.shape[0],
            dtype=_DTYPE_OF[q.dtype],
            cp=self.cp,
        )


def context_parallel(
    *,
    seqlen: int,
    heads_q: int,
    heads_kv: int | None = None,
    strategy: str = strategies.DEFAULT,
    pattern: str | Pattern = "causal",
    seqlen_kv: int | None = None,
    group: dist.ProcessGroup | None = None,
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
        group: The ranks; None = the default group, or this process alone if there is none.
        context: What the planner may know of the cluster.

    Raises:
        UnsupportedError: The strategy cannot do this; says why and what is near.
        ValueError: A name, option, parameter or number is wrong, or this process is not in group.
    """
    group, rank, cp = seat(group)
    keys = seqlen if seqlen_kv is None else seqlen_kv
    if isinstance(pattern, str):
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
    queries, own_keys = _layout(chosen, shape, context)
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


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    strategy: str = strategies.DEFAULT,
    pattern: str | Pattern = "causal",
    seqlen: int | None = None,
    seqlen_kv: int | None = None,
    group: dist.ProcessGroup | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """Attend over a sequence whose tokens are spread over ranks as `context_parallel` spreads them.

    Args:
        q: This rank's queries, `(B, heads_q, local tokens, D)`.
        k: This rank's keys, `(B, heads_kv, local tokens, D)`.
        v: This rank's values, `(B, heads_kv, local tokens, E)`.
        strategy: As in `context_parallel`.
        pattern: As in `context_parallel`.
        seqlen: Tokens of the whole sequence. Shards may be uneven, so a rank does not know it by
            itself: None sums the ranks' lengths, one small collective in every call.
        seqlen_kv: Key tokens of the whole sequence, if not `seqlen`.
        group: As in `context_parallel`.
        dropout_p: Must be 0.

    Returns:
        `(B, heads_q, local tokens, E)`, in the dtype of q.

    Raises:
        UnsupportedError, ValueError, PlanError: As `context_parallel` and `ContextParallel.attend`.
    """
    _refuse(dropout_p)
    if not (q.dim() == k.dim() == v.dim() == 4):
        raise ValueError(
            f"attention: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: each must be "
            "(B, heads, local tokens, D)"
        )
    found, _, _ = seat(group)
    if seqlen is None:
        lengths = exchange(found, (q.shape[2], k.shape[2]))
        seqlen, seqlen_kv = (sum(length[side] for length in lengths) for side in (0, 1))
    cp = context_parallel(
        seqlen=seqlen,
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        strategy=strategy,
        pattern=pattern,
        seqlen_kv=seqlen_kv,
        group=found,
    )
    return cp.attend(q, k, v, dropout_p=dropout_p)


def _refuse(dropout_p: float) -> None:
    if torch.compiler.is_compiling():
        raise UnsupportedError(
            "attention: torch.compile cannot trace a run of a plan",
            ("torch.compiler.disable around it, and torch.compile around the rest of the model",),
        )
    if dropout_p != 0.0:
        raise UnsupportedError(
            f"attention: dropout_p ({dropout_p}) must be 0: a backward pass on other ranks and in "
            "other tiles would have to repeat the random mask of each forward tile",
            ("dropout_p=0", "dropout after the output projection"),
        )


class Everything(NamedTuple):
    """What `run_all` leaves behind: results of all ranks together, by the oracle's names.

    Attributes:
        results: "out", "lse" and, with dout, "dq", "dk", "dv", as global tensors.
        forward: The forward plan, resolved.
        backward: The backward plan, resolved; None without dout.
        transports: What each direction moved through.
    """

    results: Mapping[str, torch.Tensor]
    forward: Program
    backward: Program | None
    transports: tuple[Transport, ...]


def run_all(
    problem: Problem,
    strategy: str | Chosen,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    dout: torch.Tensor | None = None,
    context: Context | None = None,
    transport: Callable[[int], Transport] = LocalTransport,
) -> Everything:
    """Run all ranks of a problem in this process, on global tensors in original token order.

    Args:
        problem: What to compute.
        strategy: By whom; name with options, or chosen.
        q: `(B, heads_q, S, D)`.
        k: `(B, heads_kv, T, D)`.
        v: `(B, heads_kv, T, E)`.
        dout: Gradient of out, `(B, heads_q, S, E)`; None = forward only.
        context: What the planner may know of the cluster.
        transport: Makes a transport that holds all of so many ranks.

    Raises:
        UnsupportedError: The strategy cannot do this problem.
        PlanError: Its plan breaks a rule, or other bytes moved than planned.
    """
    chosen = strategies.strategy(strategy) if isinstance(strategy, str) else strategy
    context = context or Context()
    ranks = range(problem.cp)
    ready = planned(chosen, problem, Direction.FORWARD, context)
    plan = ready.program.plan
    inputs = shards.initial_inputs(plan, {Tensor.Q: q, Tensor.K: k, Tensor.V: v}, ranks)
    transports = [transport(problem.cp)]
    run = run_plan(ready, inputs, transports[0])
    results = {
        "out": shards.collect(plan, {r: run.results[r] for r in plan.outputs}, Tensor.OUT),
        "lse": shards.collect(plan, run.results, Tensor.LSE),
    }
    if dout is None:
        return Everything(results, ready.program, None, tuple(transports))
    back = planned(chosen, problem, Direction.BACKWARD, context)
    plan = back.program.plan
    inputs = {
        resident: run.results[resident]
        if resident in run.results
        else shards.take(plan, dout, resident.piece)
        for resident in plan.initial
    }
    transports.append(transport(problem.cp))
    run = run_plan(back, inputs, transports[1])
    for tensor in (Tensor.DQ, Tensor.DK, Tensor.DV):
        results[tensor.value] = shards.collect(plan, run.results, tensor)
    return Everything(results, ready.program, back.program, tuple(transports))


# Who owns what ------------------------------------------------------------------------------------


@lru_cache(maxsize=128)
def _layout(chosen: Chosen, problem: Problem, context: Context) -> tuple[Sharding, Sharding]:
    """Who owns which query and key tokens: whoever a forward plan starts with."""
    queries, keys = Tensor.Q, Tensor.K
    if chosen.needs_layer:
        queries = keys = Tensor.X
        problem = replace(problem, hidden=1)
    plan = chosen.plan(problem, Direction.FORWARD, context)
    owned: dict[Tensor, list[dict[int, None]]] = {
        tensor: [{} for _ in range(problem.cp)] for tensor in (queries, keys)
    }
    for place, piece in plan.initial:
        if piece.tensor in owned:
            owned[piece.tensor][place.rank].update(dict.fromkeys(piece.chunks))
    return (
        Sharding(plan.q_chunks, tuple(map(tuple, owned[queries]))),
        Sharding(plan.kv_chunks, tuple(map(tuple, owned[keys]))),
    )


# One rank's part ----------------------------------------------------------------------------------


class Call(NamedTuple):
    """What the two directions of one call have in common besides tensors."""

    cp: ContextParallel
    problem: Problem

    def ready(self, direction: Direction) -> Ready:
        """Return the plan of all ranks, compared before it first runs.

        Raises:
            UnsupportedError: Autograd records the backward pass, for gradients of gradients.
        """
        cp = self.cp
        if direction is Direction.BACKWARD and torch.is_grad_enabled():
            layer = self.problem.hidden is not None
            raise UnsupportedError(
                f"attention{'_layer' if layer else ''}: the gradient has no gradient of its own, "
                "and create_graph=True asks for one",
                ("create_graph=False", *(() if layer else ("attention written out, at cp = 1",))),
            )
        return agreed(cp.strategy, self.problem, direction, cp.context, cp.owners, cp.group)


class _Attention(torch.autograd.Function):
    """The forward plan forward, the backward plan backward."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch gives a context without a type that has its attributes
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: Call,
    ) -> torch.Tensor:
        cp, ready = call.cp, call.ready(Direction.FORWARD)
        plan = ready.program.plan
        whole = {Tensor.Q: q, Tensor.K: k, Tensor.V: v}
        inputs = {
            resident: _piece(plan, whole[resident.piece.tensor], resident.piece, cp)
            for resident in plan.initial
            if resident.place.rank == cp.rank
        }
        run = run_plan(ready, inputs, transport_of(cp.group))
        ctx.residents = [resident for resident in plan.saved if resident.place.rank == cp.rank]
        ctx.save_for_backward(*(run.results[resident] for resident in ctx.residents))
        ctx.call = call
        return _local(plan, run.results, Tensor.OUT, cp, q)

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401  # as above
        dout: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        cp: ContextParallel = ctx.call.cp
        ready = ctx.call.ready(Direction.BACKWARD)
        plan = ready.program.plan
        inputs = dict(zip(ctx.residents, ctx.saved_tensors, strict=True))
        for resident in plan.initial:
            if resident.place.rank == cp.rank and resident.piece.tensor is Tensor.DOUT:
                inputs[resident] = _piece(plan, dout, resident.piece, cp)
        run = run_plan(ready, inputs, transport_of(cp.group))
        grads = (_local(plan, run.results, t, cp, dout) for t in (Tensor.DQ, Tensor.DK, Tensor.DV))
        return (*grads, None)


def _piece(plan: Plan, local: torch.Tensor, piece: Piece, cp: ContextParallel) -> torch.Tensor:
    """Cut a piece out of this rank's tensor; the tensor itself where that is all of it."""
    if _is_all(plan, piece, cp):
        return local.contiguous()
    rows, heads = place_in(plan, piece, cp)
    return local[:, heads][:, :, rows].contiguous()


def _local(
    plan: Plan,
    results: Mapping[Resident, torch.Tensor],
    tensor: Tensor,
    cp: ContextParallel,
    like: torch.Tensor,
) -> torch.Tensor:
    """Put the pieces of one result together as this rank's tensor."""
    problem, sharding = plan.problem, cp.sharding(keys=tensor.on_kv)
    found = [r for r in plan.outputs if r.place == Place(cp.rank) and r.piece.tensor is tensor]
    if len(found) == 1 and _is_all(plan, found[0].piece, cp):
        return _unviewed(results[found[0]])
    heads = problem.heads_kv if tensor.on_kv else problem.heads_q
    wide = problem.head_dim if tensor in (Tensor.DQ, Tensor.DK) else problem.head_dim_v
    whole = like.new_empty((problem.batch, heads, sharding.tokens(cp.rank), wide))
    for resident in found:
        rows, members = place_in(plan, resident.piece, cp)
        whole[:, torch.tensor(members)[:, None], torch.tensor(rows)] = results[resident]
    return whole


def _unviewed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a view shows all of: autograd lets nobody change a view in place."""
    base = tensor._base
    if base is None:
        return tensor
    whole = base.shape == tensor.shape and base.data_ptr() == tensor.data_ptr()
    return base if whole else tensor.clone()


def _is_all(plan: Plan, piece: Piece, cp: ContextParallel) -> bool:
    """Whether a piece is all of this rank's tensor, in its order."""
    sharding, problem = cp.sharding(keys=piece.tensor.on_kv), plan.problem
    heads = problem.heads_kv if piece.tensor.on_kv else problem.heads_q
    owned = tuple(chunk for chunk in sharding.owned[cp.rank] if sharding.chunks[chunk])
    return piece.chunks == owned and piece.heads.bit_count() == heads


def place_in(plan: Plan, piece: Piece, cp: ContextParallel) -> tuple[list[int], list[int]]:
    """Rows and heads of this rank's tensor that a piece is made of."""
    sharding = cp.sharding(keys=piece.tensor.on_kv)
    start, rows = {}, 0
    for chunk in sharding.owned[cp.rank]:
        start[chunk] = rows
        rows += len(sharding.chunks[chunk])
    found = [
        start[chunk] + row
        for chunk, tokens in zip(piece.chunks, plan.chunks(piece), strict=True)
        for row in range(len(tokens))
    ]
    return found, list(head_sets.members(piece.heads))

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Unpack, overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import strategies
from harness.attention.agreement import telling
from harness.attention.autograd import attend, attend_with_lse
from harness.attention.automatic import chosen_by_first
from harness.attention.call import AttentionCall
from harness.attention.compiling import outside_graphs
from harness.attention.group import check_device, seat
from harness.attention.inputs import (
    as_autocast,
    check_alike,
    check_name,
    check_tensors,
    described,
    dtype_of,
    named_dtype,
    pattern_of,
    refuse_dropout,
)
from harness.attention.layout import owners_of
from harness.attention.lse_gradient import dlse_columns
from harness.attention.scores import (
    AS_USUAL,
    ScoreArguments,
    ScoreOptions,
    check_sinks,
    score_options,
    with_sinks,
)
from harness.attention.tokens import Tokens
from harness.errors import UnsupportedError
from harness.plan.problem import Direction, Dtype, Problem
from harness.planning.chosen import Chosen
from harness.planning.strategy import Context
from harness.proved.plans import Owners
from harness.records import defaults
from patterns import Pattern
from patterns.kind import integer


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallel(Tokens):
    """One way to spread attention over the ranks of a group; made by `context_parallel`.

    Attributes, besides those of `Tokens`:
        strategy: Who computes what and who sends what.
        heads_q: Query heads.
        heads_kv: Key/value heads.
        cp: Ranks in the group.
        context: Facts of the cluster for the planner.
    """

    strategy: Chosen
    heads_q: int
    heads_kv: int
    cp: int
    context: Context = field(repr=False)

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

    @overload
    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        lse: Literal[False] = False,
        **asked: Unpack[ScoreArguments],
    ) -> torch.Tensor: ...

    @overload
    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        lse: Literal[True],
        **asked: Unpack[ScoreArguments],
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    @outside_graphs
    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        dropout_p: float = 0.0,
        scale: float | None = None,
        softcap: float | None = None,
        alibi: Sequence[float] | torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attend from this rank's queries to all keys. A collective, forward and backward.

        The backward pass needs every rank's: a rank whose loss leaves its output out makes the
        others wait. What is asked of the scores, all ranks ask.

        Args:
            q: `(B, heads_q, local query tokens, D)`.
            k: `(B, heads_kv, local key tokens, D)`.
            v: `(B, heads_kv, local key tokens, E)`.
            dropout_p: Must be 0.
            scale: Factor of the scores, above 0; None = `D ** -0.5`.
            softcap: Scores s become `softcap * tanh(s / softcap)`; None = they stay. This and
                `alibi` are computed by matrix products over tiles, not by a flash kernel.
            alibi: `(heads_q,)`: a score loses its head's slope times the distance of query and key
                in the whole sequence; no gradient. `alibi_slopes(heads_q)` are those of the paper.
            sinks: `(heads_q,)`: a logit of each head that takes part in the softmax and brings
                nothing. Its gradient is what this rank's tokens add, to be summed over ranks as
                that of any parameter.
            lse: Return lse as well.

        Returns:
            out, `(B, heads_q, local query tokens, E)`, in the dtype of q; under autocast in
            autocast's, as torch's own attention. With `lse` also the natural log of the sum of
            exponentials of each query's scores and sink, `(B, heads_q, local query tokens)`,
            float32 (float64 for float64), -inf where there is none. Gradients flow through it: if
            one rank's loss uses it, all ranks' do.

        Raises:
            UnsupportedError: Dropout, a transform of torch.func, or a dtype or device without
                attention or transport is asked for; or the strategy cannot do this problem; and,
                from backward, a gradient of the gradient.
            ValueError: A shape, dtype, device or option does not fit the others or this value.
            PlanError: The ranks make different calls.
        """
        with telling(self.group):
            refuse_dropout(dropout_p)
            named = {"q": q, "k": k, "v": v}
            check_tensors("attention", named)
            q, k, v = as_autocast(named).values()
            problem = self._problem(q, k, v, score_options(scale, softcap, alibi))
            if sinks is not None:
                check_sinks(sinks, self.heads_q, q)
        if not lse and sinks is None:
            return attend(q, k, v, self.call(problem))
        out, sums = attend_with_lse(q, k, v, self.call(problem, lse=True))
        if sinks is not None:
            out, sums = with_sinks(out, sums, sinks)
        return (out, sums) if lse else out

    def prepare(
        self,
        *,
        head_dim: int,
        head_dim_v: int = 0,
        batch: int = 1,
        dtype: torch.dtype = torch.bfloat16,
        scale: float | None = None,
        softcap: float | None = None,
        alibi: Sequence[float] | torch.Tensor | None = None,
        lse: bool = False,
        backward: bool = True,
    ) -> None:
        """Plan and prove what `attend` will run, so that the step itself does not.

        For loaders that know the next packing. Communicates nothing, and any thread of the process
        that will attend may call it: plans are remembered in the process.

        Args:
            head_dim: Width of q and k.
            head_dim_v: Width of v; 0 = `head_dim`.
            batch: Sequences side by side.
            dtype: Of q, k and v, as attention takes them (under autocast, autocast's).
            scale: As in `attend`.
            softcap: As in `attend`.
            alibi: As in `attend`.
            lse: lse or sinks will be asked for.
            backward: Prepare the backward pass, too.

        Raises:
            UnsupportedError: There is no attention in this dtype, or the strategy cannot do this.
            ValueError: A number does not fit its rule.
        """
        shape = (batch, head_dim, head_dim_v, named_dtype("prepare", dtype))
        problem = self._asked(shape, score_options(scale, softcap, alibi))
        call = self.call(problem, lse=lse)
        call.planned(Direction.FORWARD)
        if backward:
            call.planned(Direction.BACKWARD)
            if lse:
                call.planned(Direction.BACKWARD, dlse_columns(problem.dtype))

    def for_pattern(self, pattern: str | Pattern) -> "ContextParallel":
        """Share the next batch: another pattern of the same lengths, all else as here.

        Communicates nothing, and takes as long as planning does; any thread may make it, and
        `prepare` it, while a step runs. Ranks may own other tokens than under this pattern.

        Args:
            pattern: As in `context_parallel`.

        Raises:
            UnsupportedError: The strategy cannot do this.
            ValueError: A name or parameter is wrong, or the lengths are others.
        """
        pattern = pattern_of(pattern, self.pattern.seqlen_q, self.pattern.seqlen_kv)
        shape = replace(self, pattern=pattern)._asked((1, 1, 1, Dtype.FLOAT32), AS_USUAL)
        queries, keys = owners_of(self.strategy, shape, self.context)
        return replace(self, pattern=pattern, queries=queries, keys=keys)

    def call(self, problem: Problem, *, lse: bool = False) -> AttentionCall:
        """Return one call of the ranks, for what their tensors ask for."""
        return AttentionCall(
            strategy=self.strategy,
            problem=problem,
            context=self.context,
            owners=self._owners(problem),
            rank=self.rank,
            group=self.group,
            lse=lse,
        )

    def _owners(self, problem: Problem) -> Owners:
        """Who owns which tokens, in the chunks of a problem's plan."""
        layer = problem.hidden is not None
        return owners_of(self.strategy, problem, self.context) if layer else self.owners

    def _problem(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: ScoreOptions
    ) -> Problem:
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
        return self._asked((q.shape[0], q.shape[3], v.shape[3], dtype), scores)

    def _asked(self, shape: tuple[int, int, int, Dtype], scores: ScoreOptions) -> Problem:
        """Name what is asked for, by batch, widths of q and v, and dtype."""
        batch, head_dim, head_dim_v, dtype = shape
        return Problem(
            pattern=self.pattern,
            heads_q=self.heads_q,
            heads_kv=self.heads_kv,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            batch=batch,
            dtype=dtype,
            cp=self.cp,
            **scores._asdict(),
        )


@outside_graphs
def context_parallel(
    *,
    seqlen: int,
    heads_q: int,
    heads_kv: int | None = None,
    strategy: str = strategies.DEFAULT_STRATEGY,
    pattern: str | Pattern = "causal",
    seqlen_kv: int | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    context: Context | None = None,
) -> ContextParallel:
    """Choose how the ranks of a group share attention. Communicates nothing, but for `auto`.

    Args:
        seqlen: Tokens of the whole sequence; any number, also fewer than ranks.
        heads_q: Query heads of the model.
        heads_kv: Its key/value heads; None = as many as query heads.
        strategy: Name with options, such as `usp:4x2`; see `strategies`. `auto` is what rank 0
            recommends for heads of 128 in bfloat16, which takes it seconds the first time: a
            collective.
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
    check_name("strategy", strategy, (*strategies.STRATEGIES, strategies.AUTO))
    seqlen = integer("seqlen", seqlen)
    keys = seqlen if seqlen_kv is None else integer("seqlen_kv", seqlen_kv)
    pattern = pattern_of(pattern, seqlen, keys)
    context = context or Context()
    shape = Problem(
        pattern=pattern,
        heads_q=heads_q,
        heads_kv=heads_q if heads_kv is None else heads_kv,
        head_dim=1,
        cp=cp,
    )
    if strategy == strategies.AUTO:
        usual = replace(shape, head_dim=defaults.HEAD_DIM, dtype=defaults.DTYPE)
        strategy = chosen_by_first(group, usual, context)
    chosen = strategies.strategy(strategy)
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

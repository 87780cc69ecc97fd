"""UPipe (Untied Ulysses): a layer in stages of few heads, each stage a small Ulysses.

A stage projects U query heads from x, trades tokens for heads, attends, and trades back, so that
buffers hold U heads and not all. Keys are traded once for all stages that use them, which takes the
heads out of their natural order; 16 query heads, 4 KV heads, U = cp = 4:

    stage   0           1           2            3
    q       0 4 8 12    1 5 9 13    2 6 10 14    3 7 11 15      rank i attends the i-th
    k, v    0 1 2 3     .           .            .              and keeps KV head i

Backward saves x, out and lse, and projects and trades q, k and v again; `save_gathered` keeps them.
With a ring of R groups (`ring=R`) each group trades among its own ranks and keys visit the others;
visitors stay for the stages that use them, or with `resend` come again in each stage.
"""

from harness.build import KV, KV_GRADS, OUT_PARTS, Chunks, PlanBuilder, shard_both
from harness.errors import UnsupportedError
from harness.layer_verbs import (
    Stages,
    add_gradients,
    add_output,
    finish_x,
    finish_y,
    hold_layer,
    only_layers,
    output_weight_gradients,
    project,
    start_gradients,
)
from harness.plan import GATHERED, Free, Piece, Place, Plan, Tensor, from_rank, recomputed
from harness.problem import Direction, Problem
from harness.sharding import Sharding, contiguous, subdivided, zigzag
from harness.strategy import Context, Options, Strategy
from harness.verbs import HeadGroups, kv_grads_to_tokens, to_heads, to_tokens


def head_stages(
    problem: Problem, ranks: int, stage_heads: int, *, in_order: bool = False
) -> tuple[tuple[int, ...], ...]:
    """Say which query heads each rank attends in each stage.

    Slot i of stage s, with g query heads per KV head; rank i // (U / ranks) takes it:

        U divides heads_kv       KV head (s // g) U + i, its query s mod g
        heads_kv divides U       KV head i // k, its query s k + i mod k, where k = U / heads_kv
        neither                  each rank takes its own heads_q / ranks heads in order

    Args:
        problem: Its heads.
        ranks: Ranks that share the heads; divides U.
        stage_heads: U; divides heads_q.
        in_order: Stage s takes the query heads s U .. s U + U - 1 instead.

    Returns:
        Per stage and rank, the bit set of query heads.

    Source: arXiv:2602.21196, section 3.4 for the first row.
    """
    heads, group, u = problem.heads_q, problem.group, stage_heads
    each, share = u // ranks, heads // ranks

    def head(stage: int, slot: int) -> int:
        if in_order:
            return stage * u + slot
        if problem.heads_kv % u == 0:
            return (stage // group * u + slot) * group + stage % group
        if u % problem.heads_kv == 0:
            kv, query = divmod(slot, u // problem.heads_kv)
            return kv * group + stage * (u // problem.heads_kv) + query
        rank, own = divmod(slot, each)
        return rank * share + stage * each + own

    return tuple(
        tuple(
            sum(1 << head(stage, slot) for slot in range(rank * each, rank * each + each))
            for rank in range(ranks)
        )
        for stage in range(heads // u)
    )


def plan(
    problem: Problem, direction: Direction, options: Options, context: Context, name: str
) -> Plan:
    """Plan the stages of a layer.

    Raises:
        UnsupportedError: At attention scope; or U, the ring and the heads do not divide.
    """
    del context
    only_layers(problem, name)
    ring, ranks = _degrees(problem, options)
    u = options.stage_heads or ranks

    def shard(seqlen: int, cp: int) -> Sharding:
        return contiguous(seqlen, cp) if ring == 1 else subdivided(zigzag(seqlen, ring), ranks)

    queries, keys = shard_both(problem, shard)
    b = PlanBuilder(problem, name, direction, queries, keys, prune=options.prune)
    stages = head_stages(problem, ranks, u, in_order=options.in_order)
    pipe = _Pipe(b, Stages(problem, tuple(stage * ring for stage in stages)), ring, options)
    return pipe.forward() if direction is Direction.FORWARD else pipe.backward()


def _degrees(problem: Problem, options: Options) -> tuple[int, int]:
    cp, heads, ring = problem.cp, problem.heads_q, options.ring or 1
    rings = [r for r in range(1, cp + 1) if cp % r == 0 and heads % (cp // r) == 0]
    if ring not in rings:
        raise UnsupportedError(
            f"upipe: ring ({ring}) must divide cp ({cp}) into groups whose size divides heads_q "
            f"({heads})",
            tuple(f"ring={r}" if r > 1 else "ring=1 (the default)" for r in rings),
        )
    ranks, u = cp // ring, options.stage_heads
    if u is not None and (u % ranks or heads % u):
        legal = [n for n in range(ranks, heads + 1, ranks) if heads % n == 0]
        raise UnsupportedError(
            f"upipe: stage_heads ({u}) must be a multiple of the {ranks} ranks that share a stage "
            f"and divide heads_q ({heads})",
            tuple(f"stage_heads={n}" for n in legal),
        )
    return ring, ranks


class _Pipe:
    """The stages of one direction, on R groups of ranks."""

    def __init__(self, b: PlanBuilder, stages: Stages, ring: int, options: Options) -> None:
        self.b, self.stages, self.ring, self.options = b, stages, ring, options
        self.ranks = range(b.problem.cp)
        size = len(self.ranks) // ring
        self.groups = tuple(tuple(range(r * size, (r + 1) * size)) for r in range(ring))
        self.again = 0 if b.direction is Direction.FORWARD else recomputed(1)
        self.keeps = options.save_gathered
        for rank in self.ranks:
            hold_layer(b, rank)

    # Who has what ---------------------------------------------------------------------------

    def turn(self, heads: tuple[int, ...]) -> HeadGroups:
        """A trade of these heads inside the groups."""
        return HeadGroups(self.groups, heads)

    def whole(self, rank: int) -> Chunks:
        """The query chunks of a rank's group."""
        group = self.groups[rank // len(self.groups[0])]
        return tuple(sorted(c for peer in group for c in self.b.queries.owned[peer]))

    def keys(self, rank: int) -> Chunks:
        """The key chunks of a rank's group that anybody attends."""
        return self.b.attended_kv(self.whole(rank)) if self.b.prune else self.whole(rank)

    def visited(self, rank: int, step: int) -> int:
        """The rank whose keys visit a rank at a step of the ring."""
        return (rank - step * len(self.groups[0])) % len(self.ranks)

    def own_out(self, rank: int, stage: int) -> Piece:
        """Out of a stage's heads of a rank's own tokens."""
        heads = self.stages.in_stage(stage)
        return self.b.piece(Tensor.OUT, self.b.queries.owned[rank], heads, GATHERED)

    def gathered(self, rank: int, stage: int) -> list[Piece]:
        """What a rank keeps of a stage if q, k and v are saved."""
        b, heads = self.b, self.stages.heads[stage][rank]
        q = b.attending_q(self.whole(rank)) if b.prune else self.whole(rank)
        come = self.stages.arriving(stage)[rank]
        return [
            b.piece(Tensor.Q, q, heads, GATHERED),
            *(b.piece(tensor, self.keys(rank), come, GATHERED) for tensor in KV),
            b.piece(Tensor.OUT, self.whole(rank), heads),
        ]

    # What both directions do ----------------------------------------------------------------

    def bring(self, stage: int) -> None:
        """Project the heads of a stage and trade tokens for them."""
        b, come = self.b, self.stages.arriving(stage)
        new = 0
        for heads in come:
            new |= heads
        for rank in self.ranks:
            own = b.queries.owned[rank]
            project(b, rank, b.piece(Tensor.Q, own, self.stages.in_stage(stage), self.again))
            for tensor in KV:
                project(b, rank, b.piece(tensor, own, new, self.again))
        to_heads(b, self.turn(self.stages.heads[stage]), Tensor.Q, version=self.again)
        for tensor in KV:
            to_heads(b, self.turn(come), tensor, version=self.again)

    def attend(self, stage: int) -> None:
        """Attend the own group's keys, then those of the others as they visit."""
        b, heads = self.b, self.stages.heads[stage]
        come = heads if self.options.resend else self.stages.arriving(stage)
        for step in range(self.ring):
            for rank in self.ranks if step + 1 < self.ring else ():
                following = (rank + len(self.groups[0])) % len(self.ranks)
                keys = self.keys(self.visited(rank, step))
                b.send(rank, following, KV, keys, come[following], version=GATHERED)
            for rank in self.ranks:
                keys = self.keys(self.visited(rank, step))
                b.tile(
                    rank,
                    self.whole(rank),
                    keys,
                    heads[rank],
                    q_version=GATHERED,
                    kv_version=GATHERED,
                )
        if self.options.resend:
            self.dismiss(stage)

    def dismiss(self, stage: int) -> None:
        """Let the keys of other groups go."""
        for step in range(1, self.ring):
            for rank in self.ranks:
                keys, heads = self.keys(self.visited(rank, step)), self.stages.heads[stage][rank]
                pieces = [self.b.piece(tensor, keys, heads, GATHERED) for tensor in KV]
                if pieces[0].chunks:
                    self.b.add(Free(Place(rank), tuple(pieces)))

    # Directions -----------------------------------------------------------------------------

    def forward(self) -> Plan:
        b, stages = self.b, self.stages
        for stage in range(len(stages)):
            self.bring(stage)
            self.attend(stage)
            for rank in self.ranks:
                b.finish(rank, OUT_PARTS, self.whole(rank), stages.heads[stage][rank])
            to_tokens(b, self.turn(stages.heads[stage]), Tensor.OUT)
        for rank in self.ranks:
            own = b.queries.owned[rank]
            add_output(b, rank, [b.piece(Tensor.OUT, own, b.problem.all_heads, GATHERED)])
            finish_y(b, rank, own)
            for place, piece in self.left(rank):
                b.save_piece(place, piece)
        return b.build()

    def left(self, rank: int) -> list[tuple[Place, Piece]]:
        """What a forward plan leaves on a rank, besides weights."""
        b, pieces = self.b, []
        for stage in range(len(self.stages)):
            pieces += self.gathered(rank, stage) if self.keeps else []
            pieces.append(self.own_out(rank, stage))
            pieces.append(b.piece(Tensor.LSE, self.whole(rank), self.stages.heads[stage][rank]))
        if b.direction is Direction.FORWARD:
            pieces.append(b.exact_piece(Tensor.X, b.queries.owned[rank], 1))
        return [(Place(rank), piece) for piece in pieces]

    def backward(self) -> Plan:
        b, stages, count = self.b, self.stages, range(len(self.stages))
        for rank in self.ranks:
            for place, piece in self.left(rank):
                b.hold_piece(place, piece)
        for rank in self.ranks:
            own = b.queries.owned[rank]
            outs = [self.own_out(rank, stage) for stage in count]
            start_gradients(b, rank, b.piece(Tensor.DOUT, own, b.problem.all_heads), outs)
        for stage in count:
            turn = self.turn(stages.heads[stage])
            if not self.keeps:
                self.bring(stage)
                to_heads(b, turn, Tensor.OUT, version=GATHERED, arrive=0)
            to_heads(b, turn, Tensor.DOUT)
            self.attend(stage)
            for rank in self.ranks:
                b.finish(rank, [Tensor.DQ_PART], self.whole(rank), stages.heads[stage][rank])
            to_tokens(b, turn, Tensor.DQ)
            self.into_x(stage)
        for rank in self.ranks:
            finish_x(b, rank, b.queries.owned[rank])
            output_weight_gradients(b, rank, *stages.sets())
        return b.build()

    def into_x(self, stage: int) -> None:
        """Bring home the gradients of keys that are done with, and add all of a stage to dx."""
        b, leave = self.b, self.stages.leaving(stage)
        for step in range(1, self.ring):
            for rank in self.ranks:
                home = self.visited(rank, step)
                keys = b.needed_kv(self.whole(rank), self.keys(home))
                b.send(rank, home, KV_GRADS, keys, leave[rank], arrive=from_rank(rank))
                b.merge(home, KV_GRADS, keys, leave[rank], from_rank(rank))
        done = kv_grads_to_tokens(b, self.turn(leave)) if any(leave) else []
        for rank in self.ranks:
            own, heads = b.queries.owned[rank], self.stages.in_stage(stage)
            grads = [b.piece(Tensor.DQ, own, heads, GATHERED)]
            grads += [piece for at, piece in done if at == rank]
            add_gradients(b, rank, grads)


STRATEGY = Strategy(
    name="upipe",
    summary="a layer in stages of few heads, each a small Ulysses",
    paper="Untied Ulysses, arXiv:2602.21196, section 3.3",
    plan=plan,
    accepts=frozenset({"prune", "stage_heads", "ring", "in_order", "save_gathered", "resend"}),
)

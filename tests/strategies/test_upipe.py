"""UPipe: its head schedule, that it is Ulysses at the limit, its counts and bytes, its refusals."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness.check.cell import check, run_both
from harness.errors import UnsupportedError
from harness.execute.transport import GroupTransport, LocalTransport
from harness.explain.explanation import explain
from harness.oracle.reference import inputs_of
from harness.plan.heads import members
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.sizes import leg_bytes, linear_flops, piece_bytes
from harness.plan.tasks import (
    Collective,
    CollectiveKind,
    Linear,
    LinearOp,
    Scope,
    Task,
    Tensor,
    Tile,
    legs_of,
)
from harness.planning.layers.staged_layer import Stages
from harness.prepare.verified_plans import planned
from harness.records.config import Config
from harness.verify.pair import check_pair
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import strategy, upipe
from tests.support import layer_problem
from tests.support import ranks as processes

MOST_HEADS = 64
GIB = 2**30
HEADS = ((32, 8), (64, 8), (16, 4), (32, 16), (40, 8), (28, 4), (8, 8), (8, 1))
GRIDS = (1, 2, 4, 8)


def layer(
    heads: tuple[int, int] = (8, 2),
    cp: int = 4,
    *,
    pattern: str = "causal",
    seqlen: int = 37,
    dims: tuple[int, int] = (6, 5),
    dtype: Dtype = Dtype.FLOAT64,
    rotary: float | None = 1e4,
) -> Problem:
    return layer_problem(pattern, seqlen, heads, dims=dims, dtype=dtype, cp=cp, rotary=rotary)


def plans(problem: Problem, text: str) -> tuple[Plan, Plan]:
    forward, backward = (strategy(text).plan(problem, direction) for direction in Direction)
    return forward, backward


def legal_stages() -> Iterator[tuple[int, int, int, int]]:
    """Every (heads_q, heads_kv, ranks, U) up to so many heads."""
    for heads_q in range(1, MOST_HEADS + 1):
        divisors = [n for n in range(1, heads_q + 1) if heads_q % n == 0]
        for heads_kv, u in product(divisors, divisors):
            for ranks in (n for n in divisors if u % n == 0):
                yield heads_q, heads_kv, ranks, u


# The head schedule --------------------------------------------------------------------------


def test_the_schedule_of_every_legal_stage_attends_every_head_once() -> None:
    """Up to 64 heads; a rank attends U / ranks of them in a stage."""
    tried = 0
    for heads_q, heads_kv, ranks, u in legal_stages():
        problem = replace(layer(), heads_q=heads_q, heads_kv=heads_kv)
        for in_order in (False, True):
            stages = upipe.head_stages(problem, ranks, u, in_order=in_order)
            taken = [heads for stage in stages for heads in stage]
            assert len(stages) == heads_q // u
            assert {u // ranks} == {heads.bit_count() for heads in taken}
            assert problem.all_heads == sum(taken), (heads_q, heads_kv, ranks, u)
            tried += 1
    assert tried > 5000


def test_a_short_last_stage_attends_what_is_left() -> None:
    """Up to 64 heads, every U that ranks divide."""
    tried = 0
    for heads_q in range(1, MOST_HEADS + 1):
        divisors = [n for n in range(1, heads_q + 1) if heads_q % n == 0]
        for heads_kv, ranks in product(divisors, divisors):
            problem = replace(layer(), heads_q=heads_q, heads_kv=heads_kv)
            for u in (n for n in range(ranks, heads_q, ranks) if heads_q % n):
                for in_order in (False, True):
                    stages = upipe.head_stages(problem, ranks, u, in_order=in_order)
                    sizes = [{heads.bit_count() for heads in stage} for stage in stages]
                    full, left = divmod(heads_q, u)
                    assert [*[{u // ranks}] * full, {left // ranks}] == sizes
                    assert problem.all_heads == sum(heads for stage in stages for heads in stage)
                    tried += 1
    assert tried > 5000


def test_no_rank_needs_more_kv_heads_than_it_must_and_none_twice() -> None:
    """As few copies as contiguous runs of heads need; each used in stages that follow each other.

    Where neither of U and heads_kv divides the other, a rank may wait between two uses.
    """
    for heads_q, heads_kv, ranks, u in legal_stages():
        problem = replace(layer(), heads_q=heads_q, heads_kv=heads_kv)
        stages = upipe.head_stages(problem, ranks, u)
        case = (heads_q, heads_kv, ranks, u)
        if heads_kv % u == 0 or u % heads_kv == 0:
            for kv in range(heads_kv):
                at = [i for i, stage in enumerate(stages) if problem.kv_heads(sum(stage)) >> kv & 1]
                assert list(range(at[0], at[-1] + 1)) == at, case
        held = [problem.kv_heads(sum(stage[r] for stage in stages)) for r in range(ranks)]
        runs = [range(r * heads_q // ranks, (r + 1) * heads_q // ranks) for r in range(ranks)]
        fewest = sum(len({h // problem.group for h in run}) for run in runs)
        assert fewest == sum(heads.bit_count() for heads in held), case


def test_every_query_head_finds_its_own_kv_head_which_came_once() -> None:
    """Up to 64 heads, every legal stage: what a rank attends is there, and comes to it once."""
    for heads_q, heads_kv, ranks, u in legal_stages():
        problem = replace(layer(), heads_q=heads_q, heads_kv=heads_kv)
        stages = Stages(problem, upipe.head_stages(problem, ranks, u))
        here, done = [0] * ranks, [0] * ranks
        for stage in range(len(stages)):
            come, leave = stages.new_kv(stage), stages.released_kv(stage)
            for rank in range(ranks):
                case = (heads_q, heads_kv, ranks, u, stage, rank)
                new = problem.kv_heads(come[rank])
                assert not new & here[rank], case
                here[rank] |= new
                wanted = sum({1 << h // problem.group for h in members(stages.heads[stage][rank])})
                assert not wanted & ~here[rank], case
                assert not wanted & done[rank], case
                done[rank] |= problem.kv_heads(leave[rank])
        assert here == done


@pytest.mark.parametrize(
    ("heads", "ranks", "u", "expected"),
    [
        # The figure of the paper: 16 query heads, 4 KV heads, 4 ranks.
        ((16, 4), 4, 4, [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]),
        # Two chunks of KV heads on two ranks.
        ((8, 4), 2, 2, [[0, 2], [1, 3], [4, 6], [5, 7]]),
        # More heads in a stage than KV heads: all of these, two queries of each.
        ((12, 3), 2, 6, [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]),
        # A short last stage: ranks go through their own heads in order.
        ((12, 3), 2, 8, [[0, 1, 2, 3, 6, 7, 8, 9], [4, 5, 10, 11]]),
    ],
)
def test_stages_take_heads_in_the_published_order(
    heads: tuple[int, int], ranks: int, u: int, expected: list[list[int]]
) -> None:
    problem = replace(layer(), heads_q=heads[0], heads_kv=heads[1])
    stages = upipe.head_stages(problem, ranks, u)
    assert expected == [[h for taken in stage for h in members(taken)] for stage in stages]


# Results ------------------------------------------------------------------------------------


def verdicts(text: str, problem: Problem) -> str:
    """What `check` says of both directions, or nothing if all is right."""
    config = Config(
        strategy=text,
        pattern=problem.pattern.text,
        cp=problem.cp,
        seqlen_q=problem.seqlen_q,
        seqlen_kv=problem.seqlen_kv,
        heads_q=problem.heads_q,
        heads_kv=problem.heads_kv,
        head_dim=problem.head_dim,
        batch=problem.batch,
        dtype=problem.dtype,
        scope=Scope.LAYER,
        hidden=problem.hidden,
        rotary=problem.rotary,
    )
    return "; ".join(f"{text}: {cell.reason}" for cell in check(config) if cell.status != "passed")


@pytest.mark.parametrize(
    ("text", "heads", "cp", "pattern"),
    [
        ("upipe", (8, 4), 2, "causal"),
        ("upipe", (6, 3), 1, "full"),
        ("upipe", (8, 1), 8, "causal"),
        ("upipe:stage_heads=4", (12, 3), 2, "window:left=9,right=2"),
        ("upipe:stage_heads=14", (28, 4), 2, "causal"),
        ("upipe:stage_heads=6", (12, 3), 2, "documents:lengths=10+1+26"),
        ("upipe:save_gathered=true", (8, 2), 4, "causal"),
        ("upipe:save_gathered=true,prune=false", (8, 2), 4, "window:left=3,right=0"),
        ("upipe:in_order=true", (8, 2), 4, "causal"),
        ("upipe:stage_heads=8,short_last=true", (12, 3), 2, "causal"),
        ("upipe:stage_heads=4,short_last=true,in_order=true", (6, 3), 2, "causal"),
        ("upipe:stage_heads=4,short_last=true,save_gathered=true", (6, 2), 2, "full"),
        ("upipe:ring=2,stage_heads=4,short_last=true", (6, 1), 4, "window:left=9,right=2"),
        ("upipe:ring=2", (8, 2), 4, "causal"),
        ("upipe:ring=3", (8, 4), 6, "full"),
        ("upipe:ring=2,resend=true,stage_heads=4", (12, 3), 4, "causal"),
        ("upipe:ring=2,save_gathered=true", (8, 1), 8, "window:left=9,right=2"),
    ],
)
def test_upipe_equals_the_dense_layer(
    text: str, heads: tuple[int, int], cp: int, pattern: str
) -> None:
    """All results in float64, the bytes that moved and the memory that was held."""
    problem = layer(heads, cp, pattern=pattern, dims=(6, 6))
    assert not verdicts(text, problem)


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.BFLOAT16])
def test_upipe_is_as_exact_as_its_precision_allows(dtype: Dtype) -> None:
    problem = layer((8, 4), 2, dims=(6, 6), dtype=dtype, rotary=None)
    assert not verdicts("upipe", problem)


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS)
def test_every_legal_stage_of_every_degree_equals_the_dense_layer(heads: tuple[int, int]) -> None:
    for cp in GRIDS:
        for u in range(cp, heads[0] + 1, cp):
            if heads[0] % u == 0:
                problem = layer(heads, cp, seqlen=29, dims=(4, 4))
                assert not verdicts(f"upipe:stage_heads={u}", replace(problem, batch=1))


# With all heads in one stage it is Ulysses --------------------------------------------------


def without_edges(tasks: tuple[Task, ...]) -> list[Task]:
    return [replace(task, after=()) for task in tasks]


@pytest.mark.parametrize("pattern", ["causal", "window:left=3,right=1"])
@pytest.mark.parametrize(("heads", "cp"), [((8, 2), 2), ((12, 3), 3), ((6, 6), 2), ((8, 1), 4)])
def test_with_all_heads_in_a_stage_upipe_is_ulysses_task_by_task(
    heads: tuple[int, int], cp: int, pattern: str
) -> None:
    problem = layer(heads, cp, pattern=pattern)
    ours = plans(problem, f"upipe:stage_heads={heads[0]},save_gathered=true")
    theirs = plans(problem, "ulysses")
    for mine, other in zip(ours, theirs, strict=True):
        assert without_edges(other.tasks) == without_edges(mine.tasks)


@pytest.mark.parametrize("saving", ["", ",save_gathered=true"])
def test_with_all_heads_in_a_stage_upipe_gives_the_bits_of_ulysses(saving: str) -> None:
    problem = layer((8, 2), 4, dtype=Dtype.FLOAT32, pattern="causal")
    found = []
    for text in (f"upipe:stage_heads=8{saving}", "ulysses"):
        made = planned(problem, text)
        both = run_both(made, inputs_of(problem, 5), lambda: LocalTransport(problem.cp))
        found.append(both.results)
    assert found[0].keys() == found[1].keys() == {"y", "dx", "dw_q", "dw_k", "dw_v", "dw_o"}
    for name, values in found[0].items():
        assert torch.equal(values, found[1][name]), name


# Counts and bytes ---------------------------------------------------------------------------


def published(heads: tuple[int, int], cp: int, hidden: int) -> Problem:
    """A layer of 1M tokens in bfloat16, as in the tables of facts."""
    return Problem(
        pattern=make_pattern("causal", 2**20),
        heads_q=heads[0],
        heads_kv=heads[1],
        head_dim=128,
        dtype=Dtype.BFLOAT16,
        cp=cp,
        hidden=hidden,
        rotary=5e5,
    )


LLAMA = published((32, 8), 8, 4096)
QWEN = published((64, 8), 8, 5120)


def all_to_alls(plan: Plan) -> int:
    return sum(
        isinstance(task, Collective) and task.kind is CollectiveKind.ALL_TO_ALL
        for task in plan.tasks
    )


def sent(plan: Plan) -> set[float]:
    """GiB that ranks send; one value where all send alike."""
    by_rank = dict.fromkeys(range(plan.problem.cp), 0)
    for task in plan.tasks:
        for leg in legs_of(task):
            by_rank[leg.src.rank] += leg_bytes(plan, leg)
    return {size / GIB for size in by_rank.values()}


@pytest.mark.parametrize(
    ("problem", "text", "counts"),
    [
        (LLAMA, "upipe:stage_heads=8", (10, 20)),
        (LLAMA, "ulysses", (4, 4)),
        (QWEN, "upipe:stage_heads=8", (18, 36)),
        (LLAMA, "upipe:stage_heads=8,save_gathered=true", (10, 10)),
        (LLAMA, "upipe:stage_heads=32,save_gathered=true", (4, 4)),
        (replace(LLAMA, cp=4), "upipe:stage_heads=4", (20, 40)),
        # Stages of 24 and 8; all keys come in the first, and are needed to the last.
        (LLAMA, "upipe:stage_heads=24,short_last=true", (6, 12)),
    ],
)
def test_the_collectives_of_a_layer_are_as_many_as_published(
    problem: Problem, text: str, counts: tuple[int, int]
) -> None:
    """2 nu + 2 chunks forward, twice that backward: the code of Untied-Ulysses at e465aa8."""
    forward, backward = plans(problem, text)
    assert counts == (all_to_alls(forward), all_to_alls(backward))


# GiB that a rank sends of an 8B layer with 1M tokens on 8 ranks, forward and backward: the closed
# forms that follow from the code of Untied-Ulysses at e465aa8.
PUBLISHED = (
    ("ulysses", (2.1875, 2.1875)),
    ("upipe", (2.1875, 4.375)),
    ("upipe:stage_heads=16", (2.1875, 4.375)),
    ("upipe:stage_heads=24,short_last=true", (2.1875, 4.375)),
    ("upipe:save_gathered=true", (2.1875, 2.1875)),
    # With partial gradients in float32.
    ("ring-classic", (3.5, 3.5 + 8.0)),
    ("ring-classic:round_sent=true", (3.5, 3.5 + 4.0)),
    # In natural order keys are sent for each query head. The published form counts eight tensors of
    # all heads in bfloat16 backward: q, k, v, out, dout, dq and also the partial dk and dv of keys
    # that query heads share. We send those two in float32 unless asked to round them.
    ("upipe:in_order=true,round_sent=true", (3.5, 7.0)),
    ("upipe:in_order=true", (3.5, 7.0 + 2 * 0.875)),
)


@pytest.mark.parametrize(("text", "gib"), PUBLISHED)
def test_a_layer_of_a_million_tokens_sends_as_many_bytes_as_published(
    text: str, gib: tuple[float, float]
) -> None:
    forward, backward = plans(LLAMA, text)
    assert ({gib[0]}, {gib[1]}) == (sent(forward), sent(backward))


SMALL = replace(LLAMA, pattern=make_pattern("causal", 48), head_dim=4, head_dim_v=4, hidden=10)


def moved(text: str) -> tuple[int, int]:
    """Bytes that this rank of 8 sends of a small layer, counted at the transport."""
    both = run_both(planned(SMALL, text), inputs_of(SMALL, 2), GroupTransport)
    forward, backward = (both.traffic[direction].sent_bytes for direction in Direction)
    assert forward.keys() == backward.keys()
    return sum(forward.values()), sum(backward.values())


@pytest.mark.parametrize(("text", "gib"), PUBLISHED)
def test_eight_processes_move_the_published_bytes_scaled_down(
    text: str, gib: tuple[float, float]
) -> None:
    """48 tokens of width 4 in place of 1M of width 128."""
    scale = GIB * 48 * 4 / (2**20 * 128)
    assert processes(8).run(moved, text) == [(gib[0] * scale, gib[1] * scale)] * 8


@given(
    st.sampled_from([(8, 4, 2), (12, 3, 3), (8, 2, 8), (16, 4, 2), (28, 4, 2), (8, 8, 4)]),
    st.data(),
)
def test_keys_cross_the_network_once_for_each_rank_that_uses_them(
    shape: tuple[int, int, int], data: st.DataObject
) -> None:
    heads_q, heads_kv, cp = shape
    u = data.draw(st.sampled_from([u for u in range(cp, heads_q + 1, cp) if heads_q % u == 0]))
    problem = layer((heads_q, heads_kv), cp)
    for plan in plans(problem, f"upipe:stage_heads={u}"):
        attended: dict[int, int] = {}
        moved: dict[tuple[Tensor, int, int, int], int] = {}
        for task in plan.tasks:
            if isinstance(task, Tile):
                rank = task.place.rank
                attended[rank] = attended.get(rank, 0) | problem.kv_heads(task.heads)
            for leg in legs_of(task):
                for piece in leg.pieces:
                    for chunk, head in product(piece.chunks, members(piece.heads)):
                        key = (piece.tensor, leg.dst.rank, chunk, head)
                        moved[key] = moved.get(key, 0) + 1
        for tensor in (Tensor.K, Tensor.V):
            uses = {key: n for key, n in moved.items() if key[0] is tensor}
            assert set(uses.values()) == {1}
            heads = {(dst, head) for _, dst, _, head in uses}
            assert heads == {(r, h) for r, held in attended.items() for h in members(held)}


def test_what_backward_starts_from_is_what_it_costs_to_save() -> None:
    """Projecting again needs no q, k or v of the forward plan; keeping them needs no projection."""
    for text, recomputes in (("upipe", True), ("upipe:save_gathered=true", False)):
        forward, backward = plans(layer((8, 2), 2), text)
        check_pair(forward, backward)
        saved = {piece.tensor for _, piece in forward.saved}
        assert recomputes is not bool(saved & {Tensor.Q, Tensor.K, Tensor.V})
        assert {Tensor.X, Tensor.OUT, Tensor.LSE} <= saved
        projected = [t for t in backward.tasks if isinstance(t, Linear)]
        assert recomputes is any(task.op is LinearOp.PROJECT for task in projected)


def test_a_ring_of_groups_sends_keys_between_groups_once_or_in_every_stage() -> None:
    problem = layer((8, 2), 4, pattern="full", seqlen=48)
    once, again = (
        sum(
            leg_bytes(plan, leg)
            for task in plan.tasks
            for leg in legs_of(task)
            if leg.src.rank // 2 != leg.dst.rank // 2
        )
        for plan in (plans(problem, f"upipe:ring=2{x}")[0] for x in ("", ",resend=true"))
    )
    assert problem.group * once == again


def keys_beside(plan: Plan, heads: int) -> int:
    """The most key chunks of some heads that a rank holds gathered or visiting at a tile."""
    program, held, most = verify(plan), set[int](), 0
    for task, step in zip(plan.tasks, program.steps, strict=True):
        held.update(step.creates)
        if isinstance(task, Tile):
            here = [program.slabs[slab] for slab in held if program.slabs[slab].place == task.place]
            keys = [s.piece for s in here if s.piece.tensor is Tensor.K and s.piece.version]
            most = max(most, sum(len(p.chunks) for p in keys if p.heads & heads))
        held.difference_update(step.frees)
    return most


@pytest.mark.parametrize("ring", [2, 4])
def test_keys_that_are_sent_again_need_not_wait_beside_their_rank(ring: int) -> None:
    """Cached, all groups' keys of a chunk are there; sent again, the own, one visitor and the next.

    The price of the one is memory, of the other bytes.
    """
    problem = layer((8, 2), 2 * ring, pattern="full", seqlen=8 * 2 * ring)
    cached, again = (plans(problem, f"upipe:ring={ring}{x}")[0] for x in ("", ",resend=true"))
    group = len(cached.q_chunks) // ring
    assert keys_beside(cached, 1) == ring * group
    assert keys_beside(again, 1) == min(ring, 3) * group


def gflops(plan: Plan, op: LinearOp) -> float:
    return (
        sum(
            linear_flops(plan, task)
            for task in plan.tasks
            if isinstance(task, Linear) and task.op is op
        )
        / 1e9
    )


def test_the_price_of_saving_and_of_projecting_again_is_in_the_plans() -> None:
    """8B: saving gathered q, k, v costs 2.5 hidden states; not saving, a projection and bytes."""
    hidden_state = 2**20 // 8 * 4096 * 2
    published, saving = (plans(LLAMA, f"upipe{x}") for x in ("", ":save_gathered=true"))
    kept = [
        sum(piece_bytes(forward, piece) for place, piece in forward.saved if place.rank == 3)
        for forward, _ in (published, saving)
    ]
    assert kept[1] - kept[0] == 5 * hidden_state // 2
    # q, k and v once more: 4096 to 32 + 8 + 8 heads of 128.
    once = 2 * 2**20 * 4096 * 48 * 128 / 1e9
    assert [gflops(plan, LinearOp.PROJECT) for plan in published] == pytest.approx([once] * 2)
    assert [gflops(plan, LinearOp.PROJECT) for plan in saving] == pytest.approx([once, 0])
    assert sent(published[1]) == {4.375}
    assert sent(saving[1]) == {2.1875}
    found = [explain(strategy(f"upipe{x}"), LLAMA) for x in ("", ":save_gathered=true")]
    for answer, size, backward in zip(found, kept, (once, 0), strict=True):
        assert answer.costs is not None
        assert answer.costs.saved_bytes == size
        assert answer.costs.project_flops == pytest.approx(once * 1e9 / 8)
        assert answer.costs.project_flops_backward == pytest.approx(backward * 1e9 / 8)


# Refusals -----------------------------------------------------------------------------------


def test_upipe_is_refused_at_attention_scope_with_the_reason() -> None:
    with pytest.raises(UnsupportedError, match="whole layers") as caught:
        strategy("upipe").plan(replace(layer(), hidden=None, rotary=None), Direction.FORWARD)
    assert caught.value.nearest == ("--scope layer",)


@pytest.mark.parametrize(
    ("text", "heads", "cp", "nearest"),
    [
        ("upipe:stage_heads=6", (8, 2), 4, ("upipe:stage_heads=4", "upipe:stage_heads=8")),
        (
            *("upipe:stage_heads=4", (6, 2), 2),
            ("upipe:stage_heads=2", "upipe:stage_heads=6", "upipe:stage_heads=4,short_last=true"),
        ),
        (
            *("upipe:stage_heads=12,short_last=true", (8, 2), 4),
            ("upipe:stage_heads=4", "upipe:stage_heads=8"),
        ),
        ("upipe:stage_heads=2", (8, 2), 4, ("upipe:stage_heads=4", "upipe:stage_heads=8")),
        (
            *("upipe:stage_heads=5,ring=4", (2, 1), 4),
            ("upipe:ring=4,stage_heads=1", "upipe:ring=4,stage_heads=2"),
        ),
        ("upipe", (6, 3), 4, ("upipe:ring=2", "upipe:ring=4")),
        ("upipe:ring=3", (8, 2), 4, ("upipe:ring=1", "upipe:ring=2", "upipe:ring=4")),
    ],
)
def test_an_illegal_stage_is_refused_with_the_legal_ones(
    text: str, heads: tuple[int, int], cp: int, nearest: tuple[str, ...]
) -> None:
    with pytest.raises(UnsupportedError) as caught:
        strategy(text).plan(layer(heads, cp), Direction.FORWARD)
    assert nearest == caught.value.nearest
    for other in nearest:
        assert strategy(other).plan(layer(heads, cp), Direction.FORWARD)

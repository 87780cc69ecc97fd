"""Balance, and what `explain` says of legal and of refused problems."""

import shlex
from dataclasses import replace
from fractions import Fraction

import pytest

from harness.errors import UnsupportedError
from harness.explain.explanation import Explanation, as_json, explain
from harness.explain.overlap_rule import LINKS, hiding_block_tokens
from harness.plan.imbalance import imbalance_lockstep, imbalance_total, work_by_rank
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.tasks import Tile
from harness.planning.chosen import Chosen
from patterns import make_pattern
from strategies import STRATEGIES, quick, strategy


def problem(
    *,
    cp: int,
    pattern: str = "causal",
    seqlen: int = 131072,
    heads_q: int = 32,
    heads_kv: int = 32,
    dtype: Dtype = Dtype.BFLOAT16,
) -> Problem:
    return Problem(
        pattern=make_pattern(pattern, seqlen),
        heads_q=heads_q,
        heads_kv=heads_kv,
        head_dim=128,
        dtype=dtype,
        cp=cp,
    )


def asked(text: str, wanted: Problem) -> Explanation:
    return explain(strategy(text), wanted)


# Balance ------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [1, 2, 100, 32768])
def test_a_contiguous_causal_ring_on_4_ranks_tends_to_1_75(block: int) -> None:
    plan = strategy("ring").plan(problem(cp=4, seqlen=4 * block), Direction.FORWARD)
    exact = (Fraction(7, 2) + Fraction(1, 2 * block)) / (2 + Fraction(1, 2 * block))

    assert float(exact) == pytest.approx(imbalance_total(plan), rel=1e-12)
    assert float(exact) == pytest.approx(imbalance_lockstep(plan), rel=1e-12)
    assert block < 1000 or pytest.approx(1.75, abs=1e-4) == imbalance_total(plan)


def test_zigzag_gives_every_rank_of_a_causal_ring_the_same_work() -> None:
    plan = strategy("zigzag").plan(problem(cp=4), Direction.FORWARD)

    assert len(set(work_by_rank(plan))) == 1
    assert imbalance_total(plan) == 1.0
    assert pytest.approx(1.0, abs=1e-4) == imbalance_lockstep(plan)


def test_the_row_owner_of_star_on_8_ranks_is_40_percent_over_the_mean() -> None:
    costs = asked("ring", problem(cp=8, pattern="star")).costs

    assert costs is not None
    assert pytest.approx(1.40, abs=1e-4) == costs.imbalance_total


def test_lockstep_sees_what_the_totals_hide() -> None:
    """Rank 0 works in step 0 only and rank 1 in step 1 only: equal totals, no overlap."""
    wanted = problem(cp=2, seqlen=8, pattern="full", heads_q=1, heads_kv=1)
    plan = strategy("ring").plan(wanted, Direction.FORWARD)
    areas = iter((16, 1, 1, 16))
    tasks = tuple(
        replace(task, area=next(areas)) if isinstance(task, Tile) else task for task in plan.tasks
    )
    uneven = replace(plan, tasks=tasks)

    assert imbalance_total(uneven) == 1.0
    assert imbalance_lockstep(uneven) == pytest.approx(32 / 17)


def test_no_work_at_all_is_balanced() -> None:
    plan = strategy("ring").plan(problem(cp=2, seqlen=8), Direction.FORWARD)
    idle = replace(plan, tasks=())

    assert (imbalance_total(idle), imbalance_lockstep(idle)) == (1.0, 1.0)


# Legal --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [quick(name) for name in STRATEGIES])
def test_what_is_said_of_a_strategy_is_what_its_plans_are(name: str) -> None:
    answer = asked(name, problem(cp=4, seqlen=256, heads_q=8, heads_kv=2))
    costs = answer.costs

    assert answer.legal
    assert costs is not None
    assert costs.volume_bytes > 0
    assert costs.imbalance_total <= costs.imbalance_lockstep
    # Backward holds more, but where partial outputs travel and wait in forward.
    assert costs.memory_bytes_lower_bound <= costs.peak_bytes
    assert costs.memory_bytes_lower_bound <= costs.peak_bytes_backward
    assert costs.tokens_min == costs.tokens_max == 64


def test_inputs_and_outputs_are_the_least_memory() -> None:
    costs = asked("ring", problem(cp=8, heads_kv=8)).costs

    assert costs is not None
    # q and out of 32 heads, k and v of 8, of 16384 tokens x 128 x 2 bytes
    assert costs.memory_bytes_lower_bound == (32 + 32 + 8 + 8) * 16384 * 128 * 2


def test_zigzag_takes_1020_tokens_on_8_ranks_unevenly() -> None:
    costs = asked("zigzag", problem(cp=8, seqlen=1020)).costs

    assert costs is not None
    assert (costs.tokens_min, costs.tokens_max) == (127, 128)
    assert costs.closed_form_bytes is None


def test_uneven_heads_are_legal_and_their_price_is_shown() -> None:
    costs = asked("ulysses", problem(cp=16, heads_q=40, heads_kv=8)).costs

    assert costs is not None
    assert (costs.heads_max, costs.heads_mean) == (3, 2.5)
    assert costs.kv_copies == 2.0
    assert costs.kv_heads_max == 1
    assert pytest.approx(1.2) == costs.imbalance_total


def test_a_mesh_counts_copies_once_per_head_position() -> None:
    costs = asked("usp:4x2", problem(cp=8, heads_q=8, heads_kv=2)).costs

    assert costs is not None
    assert (costs.heads_max, costs.heads_mean) == (2, 2.0)
    assert costs.kv_copies == 2.0


@pytest.mark.parametrize(("link", "tokens"), [("A100, NVLink", 1040), ("A100, InfiniBand", 24960)])
def test_a_ring_hides_its_transfers_from_f_over_b_tokens(link: str, tokens: int) -> None:
    """About 1K over NVLink; 24.96 thousand over 100 Gb/s, which the literature has as 24.5."""
    rates = next(item for item in LINKS if item.name == link)

    assert tokens == hiding_block_tokens(problem(cp=8), rates)
    assert tokens / 4 == hiding_block_tokens(problem(cp=8, heads_kv=8), rates)


def test_blocks_of_16k_hide_behind_nvlink_and_not_behind_infiniband() -> None:
    costs = asked("ring", problem(cp=8)).costs

    assert costs is not None
    assert costs.block_tokens == 16384
    hidden = {item.link: item.hidden for item in costs.hiding}
    assert hidden["A100, NVLink"]
    assert not hidden["A100, InfiniBand"]


def test_nothing_is_said_of_hiding_where_no_keys_travel_or_no_rate_is_known() -> None:
    for text in ("ulysses", "allgather"):
        costs = asked(text, problem(cp=4, seqlen=64)).costs
        assert costs is not None
        assert costs.block_tokens is None
        assert costs.hiding == ()
    wide = asked("ring", problem(cp=4, seqlen=64, dtype=Dtype.FLOAT32)).costs
    assert wide is not None
    assert wide.hiding == ()


# Refused ------------------------------------------------------------------------------------


def parsed(flags: str) -> tuple[Chosen, int]:
    words = shlex.split(flags)
    assert words[0::2] == ["--strategy", "--cp"]
    return strategy(words[1]), int(words[3])


def test_more_ranks_than_heads_is_refused_with_the_degrees_and_meshes_that_work() -> None:
    answer = asked("ulysses", problem(cp=64, heads_q=40, heads_kv=8, seqlen=4096))

    assert not answer.legal
    assert answer.reason is not None
    assert "cp (64) must not exceed heads_q (40)" in answer.reason
    assert [near.flags for near in answer.nearest] == [
        *(f"--strategy usp:{u}x{64 // u} --cp 64" for u in (32, 16, 8, 4, 2)),
        *(f"--strategy ulysses --cp {cp}" for cp in (40, 32, 20, 16, 10, 8)),
    ]


def test_everything_that_is_called_near_is_legal_and_as_even_as_it_says() -> None:
    wanted = problem(cp=16, heads_q=10, heads_kv=2, seqlen=512)
    nearest = asked("ulysses", wanted).nearest

    assert len(nearest) > 4
    for near in nearest:
        chosen, cp = parsed(near.flags)
        again = explain(chosen, replace(wanted, cp=cp)).costs
        assert again is not None
        assert again.imbalance_total == near.imbalance_total


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("grid:rows=3", ["grid:rows=2", "grid:rows=4", "grid:rows=1", "grid:rows=8"]),
        ("grid:rows=3,fused=true", ["grid:rows=2,fused=true"]),
        ("usp:3x2", ["usp:8x1", "usp:4x2", "usp:2x4"]),
        ("double_ring:inner=5", ["double_ring:inner=8", "double_ring:inner=4"]),
    ],
)
def test_a_degree_that_does_not_divide_is_answered_with_those_that_do(
    text: str, nearest: list[str]
) -> None:
    answer = asked(text, problem(cp=8, seqlen=256))

    assert not answer.legal
    for spelled in nearest:
        assert f"--strategy {spelled} --cp 8" in [near.flags for near in answer.nearest]


def test_a_strategy_of_layers_is_answered_with_its_scope() -> None:
    wanted = problem(cp=4, seqlen=74, heads_q=6, heads_kv=2)
    nearest = asked("upipe:ring=2", wanted).nearest

    assert [near.flags for near in nearest] == ["--strategy upipe:ring=2 --cp 4 --scope layer"]
    layer = replace(wanted, hidden=6 * 128)
    assert asked("upipe:ring=2", layer).legal
    assert asked("zigzag:offload=true", wanted).nearest[0].flags == (
        "--strategy zigzag:offload=true --cp 4 --scope layer"
    )
    # What is not legal there either is answered with what is, at that scope.
    flags = [near.flags for near in asked("upipe", wanted).nearest]
    assert "--strategy upipe:ring=2 --cp 4 --scope layer" in flags
    assert all(text.endswith(" --scope layer") for text in flags)


def test_alternatives_are_looked_for_only_if_wanted() -> None:
    refused = explain(strategy("grid:rows=3"), problem(cp=4, seqlen=74), alternatives=False)
    assert refused.nearest == ()
    assert not refused.legal


def test_a_strategy_that_can_do_nothing_is_answered_with_others() -> None:
    def refuse(*_: object) -> None:
        raise UnsupportedError("never: not today", ("tomorrow",))

    never = replace(STRATEGIES["ring"], name="never", plan=refuse)
    answer = explain(Chosen(never, never.defaults), problem(cp=4, seqlen=64))

    assert answer.hints == ("tomorrow",)
    assert "--strategy zigzag --cp 4" in [near.flags for near in answer.nearest]


def test_a_refusal_has_the_same_fields_as_an_answer() -> None:
    wanted = problem(cp=8, seqlen=64, heads_q=4, heads_kv=4)
    refused, answered = as_json(asked("ulysses", wanted)), as_json(asked("ring", wanted))

    assert list(answered) == list(refused)
    assert refused["legal"] is False
    assert refused["volume_bytes"] is None

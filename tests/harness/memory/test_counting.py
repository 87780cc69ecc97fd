"""Ways to count memory: each flag adds what it says, and the published figures come out."""

from dataclasses import replace

import pytest

from harness.memory.counting import ALGORITHM, EXECUTOR, Counting, Use
from harness.memory.ledger import ledger
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.residency import Program
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import DIRECT, strategy

APART = frozenset({Use.WEIGHTS, Use.INPUT})
BF16, FLOAT32 = 2, 4


def layer(cp: int = 2, heads: tuple[int, int] = (6, 2), dtype: Dtype = Dtype.BFLOAT16) -> Problem:
    return Problem(
        pattern=make_pattern("causal", 93),
        heads_q=heads[0],
        heads_kv=heads[1],
        head_dim=8,
        batch=2,
        dtype=dtype,
        cp=cp,
        hidden=40,
        rotary=1e4,
    )


def program(text: str, direction: Direction, problem: Problem | None = None) -> Program:
    return verify(strategy(text).plan(problem or layer(), direction))


def peak(held: Program, counting: Counting) -> int:
    return max(ledger(held, counting).peak_bytes)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", DIRECT)
def test_the_algorithm_needs_no_more_than_any_implementation_holds(
    name: str, direction: Direction
) -> None:
    """And no flag makes anything smaller."""
    held = program(name, direction)
    least = peak(held, ALGORITHM)
    for flag in ("held", "wide_sums", "wide_rows", "results", "staging", "scratch", "rotary"):
        assert least <= peak(held, replace(ALGORITHM, **{flag: True})), flag
    assert peak(held, ALGORITHM) <= peak(held, EXECUTOR)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", DIRECT)
def test_what_is_counted_adds_up_and_nothing_is_left_at_less_than_zero(
    name: str, direction: Direction
) -> None:
    held = program(name, direction)
    for counting in (ALGORITHM, Counting(results=True, wide_sums=True, loop=True, scratch=True)):
        book = ledger(held, counting)
        assert [sum(uses.values()) for uses in book.uses_bytes] == list(book.peak_bytes)
        assert all(size >= 0 for uses in book.uses_bytes for size in uses.values())


def test_what_others_count_is_left_out_and_nothing_else() -> None:
    held = program("ulysses", Direction.BACKWARD)
    whole, rest = ledger(held, ALGORITHM), ledger(held, replace(ALGORITHM, apart=APART))
    for all_uses, some in zip(whole.uses_bytes, rest.uses_bytes, strict=True):
        assert not some[Use.WEIGHTS] + some[Use.INPUT]
        assert sum(all_uses.values()) - sum(some.values()) <= sum(all_uses[use] for use in APART)


def test_the_algorithm_of_a_lone_rank_backward_can_be_counted_by_hand() -> None:
    """Ulysses on one rank: x, q, k, v, out, dout, dq, dk, dv; then dx beside dq, dk, dv."""
    problem = replace(layer(1, (6, 2)), batch=1)
    book = ledger(program("ulysses", Direction.BACKWARD, problem), replace(ALGORITHM, apart=APART))
    tokens, head = 93, 93 * 8 * BF16
    x, lse = tokens * 40 * BF16, tokens * 6 * FLOAT32
    assert book.peak_bytes == (x + lse + (6 + 2 + 2) * 2 * head + 2 * 6 * head,)


def test_kernel_scratch_is_float32_and_covers_keys_where_query_heads_share_them() -> None:
    base = replace(ALGORITHM, apart=APART)
    tokens = 2 * 93 * 8
    for heads, parts in (((6, 2), 6 + 2 * 2), ((6, 6), 6)):
        held = program("ulysses", Direction.BACKWARD, layer(1, heads))
        scratch = peak(held, replace(base, scratch=True)) - peak(held, base)
        assert tokens * parts * FLOAT32 == scratch
    wide = program("ulysses", Direction.BACKWARD, layer(1, dtype=Dtype.FLOAT32))
    assert peak(wide, replace(base, scratch=True)) == peak(wide, base)


def test_sums_are_narrow_in_the_algorithm_and_wide_where_asked() -> None:
    held = program("ulysses", Direction.BACKWARD, layer(1))
    narrow, wide = (
        ledger(held, replace(ALGORITHM, wide_sums=wide)).uses_bytes[0][Use.ACCUMULATOR]
        for wide in (False, True)
    )
    assert (narrow, wide) == (2 * 93 * 8 * 10 * BF16, 2 * 93 * 8 * 10 * FLOAT32)


def test_the_loop_of_released_ring_code_costs_as_much_as_its_buffers() -> None:
    """Ulysses as a ring of one: results, float32 sums, buffers to receive, casts of all at once."""
    problem = replace(layer(1, (6, 2)), batch=1)
    counting = replace(ALGORITHM, wide_sums=True, results=True, loop=True, apart=APART)
    book = ledger(program("ulysses", Direction.BACKWARD, problem), counting)
    tokens, head = 93, 93 * 8
    x, lse = tokens * 40 * BF16, tokens * 6 * FLOAT32
    reads = (6 + 2 + 2 + 6 + 6) * head * BF16  # q, k, v, out, dout
    sums, receive = 10 * head * FLOAT32, 4 * head * FLOAT32
    results = casts = 10 * head * BF16
    assert book.peak_bytes == (x + lse + reads + sums + receive + results + casts,)


def test_a_loop_lets_its_buffers_go_before_the_next_stage_enters_its_own() -> None:
    """Eight stages of one head hold the buffers of one head, not of eight."""
    problem = replace(layer(1, (8, 8)), batch=1)
    held = program("upipe:stage_heads=1", Direction.BACKWARD, problem)
    plain = replace(ALGORITHM, wide_sums=True, apart=APART)
    head = 93 * 8
    one_stage = head * (
        3 * BF16 + 2 * FLOAT32 + 3 * BF16 + 5 * BF16
    )  # results, receive, casts, reads
    more = peak(held, replace(plain, loop=True)) - peak(held, plain)
    assert 0 < more <= one_stage

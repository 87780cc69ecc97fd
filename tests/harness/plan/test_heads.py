"""Sets of heads: bit sets that print as ranges and cut one another into atoms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.plan import heads as head_sets
from harness.plan.problem import Problem
from patterns import make_pattern

sets = st.integers(0, (1 << 12) - 1)


@pytest.mark.parametrize(
    ("heads", "text"),
    [(0b1, "0"), (0b1111, "0-3"), (0b100001111, "0-3,8"), (0b101100, "2-3,5"), (0, "")],
)
def test_heads_print_as_ranges(heads: int, text: str) -> None:
    assert text == head_sets.text(heads)


@given(st.integers(0, 9), st.integers(0, 9))
def test_a_span_has_its_members(start: int, length: int) -> None:
    span = head_sets.span(start, start + length)
    assert tuple(range(start, start + length)) == head_sets.members(span)


@given(st.lists(sets, max_size=6))
def test_atoms_are_the_coarsest_partition_that_every_set_is_a_union_of(
    given_sets: list[int],
) -> None:
    atoms = head_sets.atoms(given_sets)
    signature = {
        head: tuple(heads >> head & 1 for heads in given_sets)
        for heads in given_sets
        for head in head_sets.members(heads)
    }
    by_signature: dict[tuple[int, ...], int] = {}
    for head, key in signature.items():
        by_signature[key] = by_signature.get(key, 0) | 1 << head

    assert sorted(by_signature.values()) == sorted(atoms)
    assert [atom & -atom for atom in atoms] == sorted(atom & -atom for atom in atoms)


@given(st.sampled_from(((6, 2), (7, 7), (5, 1), (12, 4))), sets)
def test_kv_heads_follow_from_query_heads(shape: tuple[int, int], heads: int) -> None:
    heads_q, heads_kv = shape
    problem = Problem(
        pattern=make_pattern("full", 3), heads_q=heads_q, heads_kv=heads_kv, head_dim=4
    )
    heads &= problem.all_heads
    expected = {head // (heads_q // heads_kv) for head in head_sets.members(heads)}
    assert expected == set(head_sets.members(problem.kv_heads(heads)))

"""A part of a pattern allows what the whole allows there."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from patterns import Pattern, make_pattern
from patterns.excerpt import excerpt
from tests.patterns.generators import any_patterns, chunks, dense, times_covered


@given(any_patterns, st.data())
def test_an_excerpt_is_the_whole_at_its_runs(pattern: Pattern, data: st.DataObject) -> None:
    rows, columns = (
        data.draw(
            st.lists(chunks(end, steps=(1,)), min_size=1, max_size=4).filter(
                lambda runs: any(map(len, runs))
            )
        )
        for end in (pattern.seqlen_q, pattern.seqlen_kv)
    )
    part = excerpt(pattern, rows, columns)
    q, k = (np.concatenate([*map(np.array, side)]).astype(int) for side in (rows, columns))
    expected = dense(pattern)[np.ix_(q, k)]
    assert dense(part).tolist() == expected.tolist()
    covered = times_covered(part.bands, range(part.seqlen_q), range(part.seqlen_kv))
    assert covered.tolist() == expected.astype(int).tolist()


def test_runs_of_another_step_and_nothing_at_all_are_refused() -> None:
    pattern = make_pattern("causal", 9)
    with pytest.raises(ValueError, match=r"rows .* must be runs of step 1"):
        excerpt(pattern, [range(0, 9, 2)], [range(3)])
    with pytest.raises(ValueError, match=r"columns .* not all empty"):
        excerpt(pattern, [range(3)], [range(4, 4)])

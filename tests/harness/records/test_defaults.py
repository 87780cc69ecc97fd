"""One set of defaults for all verbs, and headings that name the whole cell."""

import pytest

from harness import cli
from harness.cluster.presets import DEFAULT_CLUSTER
from harness.plan.problem import Direction, Dtype, Problem
from harness.records.defaults import CP, PATTERN, SEQLEN, heads_of, usual
from harness.report.format import cell_heading
from harness.sweep.suite import Mode, Part
from harness.terminal.arguments import problem_of
from patterns import make_pattern


@pytest.mark.parametrize("verb", ["explain", "plan", "trace", "simulate"])
def test_every_verb_means_the_problem_that_a_sweep_means(verb: str) -> None:
    args = cli.parser().parse_args([verb])
    (cell,) = {cell.problem for cell in Part(mode=Mode.SIMULATE, strategies=("ring",)).cells()}
    assert problem_of(args) == cell == usual(PATTERN, CP, SEQLEN, 32, 8)
    if verb != "explain":
        assert args.cluster == DEFAULT_CLUSTER == Part(mode=Mode.SIMULATE).cluster[0]


@pytest.mark.parametrize(
    ("given", "heads"),
    [
        ((None, None), (32, 8)),
        ((None, 16), (32, 16)),
        ((40, None), (40, 40)),
        ((40, 8), (40, 8)),
    ],
)
def test_heads_that_are_not_given(
    given: tuple[int | None, int | None], heads: tuple[int, int]
) -> None:
    assert heads_of(*given) == heads


def test_a_heading_names_all_that_decides_a_plan() -> None:
    problem = Problem(
        pattern=make_pattern("star", 3072, 4096, cross=True),
        heads_q=6,
        heads_kv=2,
        head_dim=24,
        batch=3,
        dtype=Dtype.FLOAT16,
        cp=5,
        hidden=77,
    )
    assert cell_heading("usp:5x1", problem, Direction.BACKWARD) == (
        "usp:5x1 star cp=5 S=3k keys=4k B=3 layer hidden=77 heads=6/2 D=24 float16 backward"
    )

"""Wrong plans that were proved once, or that ended in a crash: each is refused by its rule."""

import json
from pathlib import Path

import pytest

from harness.errors import MisfitError, PlanError
from harness.plan.reader import from_json
from harness.verify.proof import verify

FOLDER = Path(__file__).parents[2] / "fixtures" / "wrong_plans"
EXIST = "the chunks of a piece are some of the plan's, each once"
BESIDE = "a partial output and its lse stay side by side, out first"
SOME = "a task has at least one piece to work on"
RULES = {
    "chunk-99": EXIST,
    "collective-without-legs": "a collective has at least one leg",
    "finish-of-q": "a finish turns partial results into results",
    "finish-on-a-host": "a device computes; the host only stores",
    "free-chunk-twice": EXIST,
    "heads-come-home-in-other-orders": BESIDE,
    "key-chunk-99": EXIST,
    "layer-problem-attention-plan": "a plan does a layer if its problem is a layer",
    "linear-of-nothing": "a product is one of LINEAR_FORMS",
    "merge-lse-before-out": BESIDE,
    "merge-of-no-chunks": EXIST,
    "merge-of-nothing": SOME,
    "merge-out1-lse2-out2-lse1": BESIDE,
    "out-travels-with-another-lse": BESIDE,
    "out-whole-lse-in-parts": BESIDE,
    "overlapping-heads-in-a-collective": "pieces that arrive together join",
    "recomputed-key-chunk-twice": EXIST,
    "tile-of-nothing": "a tile reads and writes what its kernel does, in order",
    "transfer-of-no-chunks": EXIST,
    "weight-gradient-chunk-twice": EXIST,
}


def test_every_wrong_plan_is_listed() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} == RULES.keys() | {"no-dtype"}


@pytest.mark.parametrize("name", RULES)
def test_a_wrong_plan_is_refused_by_its_rule(name: str) -> None:
    plan = from_json((FOLDER / f"{name}.json").read_text())
    with pytest.raises(PlanError) as caught:
        verify(plan)
    assert type(caught.value) is MisfitError
    assert caught.value.rule == RULES[name]
    assert plan.strategy in caught.value.__notes__[0]  # the grid can be drawn all the same


def test_a_plan_without_a_dtype_has_the_usual_one() -> None:
    plan = from_json((FOLDER / "no-dtype.json").read_text())
    assert plan.problem.dtype == "float32"
    verify(plan)


def body(**changed: object) -> str:
    """A plan of nothing, as JSON; fields of the problem may be changed, or the plan's own."""
    plan = json.loads((FOLDER / "no-dtype.json").read_text())
    for name, value in changed.items():
        (plan["problem"] if name in plan["problem"] else plan)[name] = value
    return json.dumps(plan)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"heads_q": 2**20, "heads_kv": 2**20}, r"problem\.heads_q \(1048576\).* at most 1024"),
        ({"heads_kv": 2**20}, r"problem\.heads_kv \(1048576\).* at most 1024"),
        ({"q_chunks": [[0, 0, 1]] * 20_000}, "q_chunks has 20000 chunks.* at most 4096"),
        ({"kv_chunks": [[0, 0, 1]] * 20_000}, "kv_chunks has 20000 chunks.* at most 4096"),
        ({"seqlen_q": 2**40}, r"seqlen_q \(1099511627776\)"),
    ],
)
def test_what_is_larger_than_any_plan_is_refused_where_it_is_read(
    changed: dict[str, object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        from_json(body(**changed))


def test_a_long_sequence_is_looked_at_in_parts() -> None:
    """More tokens than are looked at together, with one missing and one doubled behind them."""
    seqlen = 2**24 + 2
    cut = [[0, seqlen - 1, 2], [1, seqlen, 2]]
    fields = {"seqlen_q": seqlen, "seqlen_kv": seqlen, "initial": [], "saved": [], "outputs": []}
    wrong = {
        f"key chunks cover every token .* token {seqlen - 3}": [
            cut[0],
            [1, seqlen - 4, 2],
            [seqlen - 1, seqlen, 1],
        ],
        "key chunks are disjoint": [*cut, [seqlen - 1, seqlen, 1]],
        "key chunks ascend inside the sequence": [*cut, [seqlen, seqlen + 1, 1]],
    }
    for words, table in wrong.items():
        plan = from_json(body(**fields, tasks=[], q_chunks=cut, kv_chunks=table))
        with pytest.raises(MisfitError, match=words):
            verify(plan)


def test_long_lists_are_cut_in_messages() -> None:
    piece = ["q", list(range(100_000)), 1, 0]
    plan = from_json(body(initial=[[[0, "device"], piece]]))
    with pytest.raises(MisfitError, match="chunks") as caught:
        verify(plan)
    assert len(str(caught.value)) < 250

"""Models: parameters, attention's ledger scaled, what fills a GPU, and the longest context."""

from dataclasses import replace
from fractions import Fraction

import pytest

from harness.cluster.presets import cluster
from harness.memory.counting import Counting, Use
from harness.memory.ledger import ledger
from harness.plan.problem import Direction
from harness.training.attention_memory import attention_held, layer_program
from harness.training.footprint import footprint, max_context, on_cluster
from harness.training.models import Model
from harness.training.named_models import MODELS, model
from harness.training.stack import HOST_BYTES, Column, Stack, counting
from strategies import strategy

GIB = 2**30
M = 2**20
LLAMA, QWEN = model("llama3-8b"), model("qwen3-32b")
NODE, PAIR = cluster("h100-1x8"), cluster("h100-2x8")
SMALL = Model(
    name="small",
    hidden=24,
    layers=3,
    heads_q=6,
    heads_kv=2,
    head_dim=4,
    ffn=56,
    vocab=100,
    rotary=1e4,
)


# Models -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3-8b", 8_030_261_248),  # arXiv:2602.21196, released configuration
        ("qwen3-32b", 32_519_623_680),  # as above
        ("llama2-7b", 6_738_415_616),  # Llama 2 model card
    ],
)
def test_presets_have_as_many_parameters_as_published(name: str, parameters: int) -> None:
    assert MODELS[name].parameters == parameters


def test_a_model_is_a_name_or_pairs_or_a_name_with_pairs() -> None:
    assert MODELS["llama3-8b"] == model("llama3-8b")
    assert model("llama3-8b,layers=16,heads=64/16") == replace(
        LLAMA, name="llama3-8b,layers=16,heads=64/16", layers=16, heads_q=64, heads_kv=16
    )
    text = "hidden=24,layers=3,heads=6/2,head_dim=4,ffn=56,vocab=100,rotary=10000"
    assert replace(SMALL, name=text) == model(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("gpt", "choose from llama3-8b, llama3-70b, .* name a config.json"),
        ("llama3_8b", r"did you mean llama3-8b\?"),
        ("llama3-8b,depth=3", "depth is unknown"),
        ("llama3-8b,layers=1.5", r"layers \(1.5\) must be a whole number of at least 1"),
        ("hidden=24,layers=3", "lacks heads_q, heads_kv, head_dim, ffn, vocab, rotary"),
    ],
)
def test_a_model_that_is_none_is_refused_with_the_choices(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        model(text)


# One truth: the ledger ----------------------------------------------------------------------

COUNTINGS = [
    counting(column, strategy(name))
    for column in Column
    for name in (("ulysses", "upipe", "fpdt") if column is Column.RELEASED else ("ulysses",))
]


@pytest.mark.parametrize("how", COUNTINGS)
@pytest.mark.parametrize("name", ["ulysses", "upipe", "zigzag", "ring", "usp:2x2", "fpdt"])
@pytest.mark.parametrize("local", [4096, 3 * 65536])
def test_attention_of_a_model_is_the_ledger_of_its_plan_to_the_byte(
    name: str, local: int, how: Counting
) -> None:
    """At lengths far from the plan that is scaled; the plan of that very length says the same."""
    cp, seqlen = 2 if name != "usp:2x2" else 4, local * 4
    shown = attention_held(SMALL, strategy(name), cp, 8, seqlen, how)
    programs = [layer_program(SMALL, name, cp, 8, seqlen, d) for d in Direction]
    own = replace(how, apart=how.apart - {Use.INPUT})
    books = ledger(programs[0], own), ledger(programs[1], how)
    assert [sum(shown.forward.values()), sum(shown.backward.values())] == [
        max(book.peak_bytes) for book in books
    ]
    assert shown.host == max(max(book.host_peak_bytes) for book in books)


@pytest.mark.parametrize("column", Column)
@pytest.mark.parametrize("name", ["ulysses", "upipe", "zigzag"])
def test_weights_that_are_larger_than_all_tokens_do_not_scale_with_them(
    name: str, column: Column
) -> None:
    """The plan that is scaled has few tokens: gradients of weights are the most of it."""
    chosen = strategy(name)
    how = counting(column, chosen)
    shown = attention_held(LLAMA, chosen, 4, 8, 4 * 65536, how)
    book = ledger(layer_program(LLAMA, name, 4, 8, 4 * 65536, Direction.BACKWARD), how)
    assert sum(shown.backward.values()) == max(book.peak_bytes)


# What fills a GPU ---------------------------------------------------------------------------


def attention_gib(name: str, column: Column = Column.RELEASED) -> float:
    chosen = strategy(name)
    held = attention_held(LLAMA, chosen, 8, 8, 3 * M, counting(column, chosen))
    return sum(held.backward.values()) / GIB


@pytest.mark.parametrize(
    ("name", "attention", "whole"),
    # arXiv:2602.21196, project page, memory of 8B at 3M on 8 x H100
    [("ulysses", 33.0, 64.6), ("upipe", 19.5, 51.1)],
)
def test_memory_at_three_million_tokens_is_as_published(
    name: str, attention: float, whole: float
) -> None:
    assert attention_gib(name) == pytest.approx(attention, rel=0.05)
    found = footprint(LLAMA, strategy(name), NODE, 3 * M)
    assert found.peak_bytes / GIB == pytest.approx(whole, rel=0.05)
    assert found.parts["states"] / GIB == pytest.approx(15.0, rel=0.01)


@pytest.mark.parametrize(
    ("name", "seqlen", "gib"),
    [
        # arXiv:2602.21196, project page, figure of 8B on 16 x H100, read off to 0.1
        ("usp", M // 2, 16.25),
        ("usp", 2 * M, 28.72),
        ("usp", 4 * M, 45.33),
        ("usp", 6 * M, 62.02),
        ("upipe", M // 2, 15.71),
        ("upipe", 2 * M, 26.48),
        ("upipe", 4 * M, 40.84),
        ("upipe", 6 * M, 55.20),
        ("upipe", 8 * M, 69.56),
    ],
)
def test_memory_over_two_nodes_is_as_published(name: str, seqlen: int, gib: float) -> None:
    found = footprint(LLAMA, on_cluster(name, PAIR), PAIR, seqlen)
    assert found.peak_bytes / GIB == pytest.approx(gib, rel=0.05)


def test_with_the_same_flags_for_both_upipe_saves_less_than_published() -> None:
    """Released Ulysses runs a ring's loop for nothing: most of the gap (published: 4.5 A)."""
    state = Fraction(3)  # GiB of a hidden state
    same = attention_gib("ulysses", Column.IMPLEMENTATION) - attention_gib(
        "upipe", Column.IMPLEMENTATION
    )
    released = attention_gib("ulysses") - attention_gib("upipe")
    assert same / state == pytest.approx(2, abs=0.05)
    assert released / state == pytest.approx(5, abs=0.05)


def test_without_checkpoint_offload_or_tiles_nothing_of_this_length_fits() -> None:
    whole = footprint(LLAMA, strategy("ulysses"), NODE, 3 * M).peak_bytes
    for less in ({"checkpoint": False}, {"offload": False}, {"tiled": False}):
        stack = Stack(**{"checkpoint": True, "offload": True, "tiled": True, **less})
        found = footprint(LLAMA, strategy("ulysses"), NODE, 3 * M, stack=stack).peak_bytes
        assert found > 1.4 * whole
        assert found > NODE.gpu.memory_bytes


# The longest context ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape", "machine", "tokens"),
    [
        # arXiv:2602.21196, project page: what ran, where the next length did not or was not tried
        ("ring", LLAMA, NODE, 3 * M),
        ("zigzag", LLAMA, NODE, 3 * M),
        ("ulysses", LLAMA, NODE, 3 * M),
        ("fpdt", LLAMA, NODE, 4 * M),
        ("upipe", LLAMA, NODE, 5 * M),
        ("usp", LLAMA, PAIR, 6 * M),
        ("upipe", LLAMA, PAIR, 8 * M),
        ("zigzag", QWEN, PAIR, 2 * M),
        ("usp", QWEN, PAIR, 2 * M),
        ("fpdt", QWEN, PAIR, 4 * M),
        ("upipe", QWEN, PAIR, 4 * M),
    ],
)
def test_the_longest_context_of_eighty_gigabytes_is_as_published(
    name: str, shape: Model, machine: object, tokens: int
) -> None:
    at = NODE if machine is NODE else PAIR
    found = max_context(shape, on_cluster(name, at), at)
    assert found.tokens == tokens
    assert found.by == ("host" if name == "fpdt" else "gpu")
    assert found.at_limit is not None
    assert found.at_limit.peak_bytes <= 80e9
    assert found.at_limit.host_bytes <= HOST_BYTES


def test_more_memory_holds_more_and_too_little_holds_nothing() -> None:
    chosen = strategy("upipe")
    assert max_context(LLAMA, chosen, NODE, gpu_bytes=140 * 10**9).tokens > 5 * M
    none = max_context(LLAMA, chosen, NODE, gpu_bytes=10**10)
    assert (none.tokens, none.at_limit, none.by) == (0, None, "gpu")


def test_on_two_nodes_upipe_keeps_its_stages_inside_a_node() -> None:
    assert on_cluster("upipe", PAIR).text == "upipe:ring=2"
    assert on_cluster("upipe", NODE).text == "upipe"
    assert on_cluster("ulysses", PAIR).text == "ulysses"

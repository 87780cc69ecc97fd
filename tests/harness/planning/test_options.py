"""Options of strategies: what may be typed, what is said of what may not, what is left open."""

from dataclasses import replace

import pytest

from harness.plan.dealing import DEALT
from harness.plan.plan import Plan
from harness.plan.problem import Direction, Problem
from harness.planning.options import options_of, placement_of
from harness.planning.strategy import Context
from patterns import make_pattern
from strategies import DIRECT, EVERY_STRATEGY, STRATEGIES, strategy

CONTEXT = Context(gpus_per_node=4)


def problem(name: str) -> Problem:
    """12 ranks over nodes of 4: what is chosen is neither 1 nor all of them."""
    return Problem(
        pattern=make_pattern("causal", 131),
        heads_q=24,
        heads_kv=6,
        head_dim=8,
        batch=2,
        cp=12,
        hidden=None if name in STRATEGIES else 40,
    )


def unnamed(plan: Plan) -> Plan:
    return replace(plan, strategy="")


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("name", [*DIRECT, "owner:placement=balanced", "usp:placement=ptrr"])
def test_what_is_resolved_is_what_is_planned(name: str, direction: Direction) -> None:
    chosen, wanted = strategy(name), problem(name.partition(":")[0])
    resolved = chosen.resolved(wanted, direction, CONTEXT)

    for option in options_of(chosen.options):
        if option == "chunk" and placement_of(chosen.options) not in DEALT:
            continue  # nothing is cut into chunks
        assert getattr(resolved.options, option) is not None, option
    plans = [way.plan(wanted, direction, CONTEXT) for way in (chosen, resolved)]
    assert unnamed(plans[0]) == unnamed(plans[1])
    assert strategy(resolved.text) == resolved


@pytest.mark.parametrize(
    ("text", "resolved"),
    [
        ("usp", "usp:2x6"),
        ("usp:ring=3", "usp:4x3"),
        ("double_ring", "double_ring:inner=4"),
        ("double_ring:placement=stripe", "double_ring:placement=stripe,inner=4"),
        ("upipe", "upipe:stage_heads=12"),
        ("fpdt", "fpdt:parts=2"),
        ("zigzag", "zigzag"),
        ("ring:placement=ptrr,chunk=2", "ring:placement=ptrr,chunk=2"),
    ],
)
def test_degrees_are_spelled_out(text: str, resolved: str) -> None:
    wanted = replace(problem(strategy(text).strategy.name), heads_kv=2)
    assert strategy(text).resolved(wanted, Direction.FORWARD, CONTEXT).text == resolved


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("allgather:placement=nope", ["placement (nope)", "contiguous, zigzag, stripe"]),
        ("usp:4", ["option (4)", "4x2 (Ulysses x ring)", "ulysses=4", "ring_inside="]),
        ("usp:pace=3", ["option (pace)", "placement=", "`list`"]),
        ("usp:4x", ["ring ()", "at least 1"]),
        ("ring:prune=yes", ["prune (yes)", "true or false"]),
        ("grid:rows=0", ["rows (0)", "whole number of at least 1"]),
        ("ring:4", ["option (4)", "prune="]),
        ("grid:rows=²", ["rows (²)", "whole number of at least 1 and at most"]),
        ("usp:\u0661x2", ["ulysses (\u0661)", "whole number of at least 1 and at most"]),
        ("ultraattn:seconds=\u0661", ["seconds (\u0661)", "must be a positive number and"]),
        ("ultraattn:seconds=1_0", ["seconds (1_0)", "must be a positive number and"]),
        (f"grid:rows={'9' * 5000}", [f"rows ({'9' * 24}...)", "whole number of at least 1"]),
    ],
)
def test_what_may_not_be_typed_is_answered_with_what_may(text: str, parts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^\w+: ") as caught:
        strategy(text)
    for part in parts:
        assert part in str(caught.value)


def test_nothing_is_said_of_meshes_where_there_is_none() -> None:
    with pytest.raises(ValueError, match="option") as caught:
        strategy("upipe:4")
    assert "4x2" not in str(caught.value)


def test_every_option_without_a_default_says_what_is_taken() -> None:
    for found in EVERY_STRATEGY.values():
        for name, option in options_of(found.defaults).items():
            open_to_choice = getattr(found.defaults, name) is None
            assert open_to_choice == bool(option.unset), (found.name, name)


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("ring:prune=true,prune=false", "prune"),
        ("usp:2x3,ring=3", "ring"),
        ("upipe:stage-heads=2,stage_heads=4", "stage_heads"),
    ],
)
def test_an_option_is_given_once(text: str, option: str) -> None:
    with pytest.raises(ValueError, match=rf"option \({option}\) must be given once; {text} has it"):
        strategy(text)

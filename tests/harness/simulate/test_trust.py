"""How far a predicted time is trusted: by kernel calls, messages, kinds of transfers and regime."""

from dataclasses import replace

import pytest

from harness.cluster.calibration import calibration
from harness.cluster.transfer_kinds import transfer_kinds
from harness.plan.problem import Direction, Dtype, Problem
from harness.planning.strategy import Context
from harness.simulate.calibrated import Trust, predict, pricer, skeleton_on
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import strategy

HAMMING = calibration("h100-hamming")


def problem(seqlen: int = 98304, cp: int = 8, heads: tuple[int, int] = (24, 24)) -> Problem:
    return Problem(
        pattern=make_pattern("causal", seqlen),
        heads_q=heads[0],
        heads_kv=heads[1],
        head_dim=128,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )


def said(name: str, made: Problem, gpus_per_node: int = 8) -> Trust:
    context = Context(gpus_per_node=gpus_per_node)
    program = verify(strategy(name).plan(made, Direction.FORWARD, context))
    fitted = replace(HAMMING, hardware=replace(HAMMING.hardware, gpus_per_node=gpus_per_node))
    prices = pricer(made, Direction.FORWARD, fitted, eager=False)
    return predict(skeleton_on(program, fitted, eager=False), made, prices).trust


@pytest.mark.parametrize(
    ("name", "near", "both"),
    [
        ("ring", ["one_peer"], ["far one_peer", "near one_peer"]),
        ("ring:direction=both", ["both_ways"], ["far one_peer", "near both_ways"]),
        ("allgather", ["all_gather"], ["far all_gather", "near all_gather"]),
        ("ulysses", ["all_to_all"], ["far all_to_all", "near all_to_all"]),
        ("usp:4x2", ["all_to_all", "one_peer"], ["far one_peer", "near all_to_all"]),
        ("owner", ["several_peers"], ["far several_peers", "near several_peers"]),
        ("tasp", ["both_ways"], ["far both_ways", "near both_ways"]),
    ],
)
def test_kinds_of_transfers_on_one_node_and_on_two(
    name: str, near: list[str], both: list[str]
) -> None:
    made = problem(seqlen=6144)
    plan = strategy(name).plan(made, Direction.FORWARD, Context(gpus_per_node=4))
    assert list(transfer_kinds(plan, 8)) == [f"near {kind}" for kind in near]
    assert list(transfer_kinds(plan, 4)) == both


def test_backward_kinds_are_those_of_gradients_too() -> None:
    plan = strategy("allgather").plan(problem(seqlen=6144), Direction.BACKWARD)
    assert transfer_kinds(plan, 8) == ("near all_gather", "near reduce_scatter")
    # A pruned ring's gradients go home to whom they are of, past its neighbour; no key does.
    ring = strategy("ring").plan(problem(seqlen=6144), Direction.BACKWARD)
    assert transfer_kinds(ring, 8) == ("near several_peers",)


@pytest.mark.parametrize("name", ["zigzag", "ring", "owner"])
def test_an_error_is_that_of_runs_with_such_transfers(name: str) -> None:
    found = said(name, problem())
    assert found.inside
    assert found.expected_error is not None
    assert found.p90 is not None
    assert found.expected_error < found.p90
    assert (found.expected_error, found.p90) in {(one.mean, one.p90) for one in HAMMING.validated}


@pytest.mark.parametrize("name", ["allgather", "ulysses", "usp:4x2", "ring:direction=both", "tasp"])
def test_transfers_that_no_run_made_leave_the_error_unknown(name: str) -> None:
    found = said(name, problem())
    assert not found.inside
    assert found.expected_error is found.p90 is None
    assert "no like run was validated" in found.text


def test_few_queries_with_shared_heads_and_long_calls_lie_outside() -> None:
    # Published as pass-KV: 3200 new of 128,000 tokens, 16 heads that share one, a GPU a node.
    made = replace(
        problem(128000, 4, (16, 1)),
        pattern=make_pattern("causal:align=bottom_right", 3200, 128000, cross=True),
    )
    found = said("ring", made, gpus_per_node=1)
    assert not found.inside
    assert found.expected_error is None
    assert "32000 tokens: more than 32 to 1" in found.text or "queries whose heads" in found.text
    short = said("ring", problem(6144, 8, (24, 4)))
    assert "768 queries whose heads share keys" in short.text
    assert "share keys" not in said("ring", problem(6144, 8, (24, 24))).text


def test_more_nodes_than_were_measured_lie_outside() -> None:
    found = said("ring", problem(seqlen=2**19 * 9 // 8, cp=9), gpus_per_node=1)
    assert not found.inside
    assert "on 9 nodes" in found.text

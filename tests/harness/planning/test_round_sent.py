"""Partial gradients that are rounded to be sent: fewer bytes, still right, and only they."""

from dataclasses import replace

import pytest
import torch

from harness.check.cell import check, run_both
from harness.check.run import check_group
from harness.execute.transport import LocalTransport
from harness.explain.volumes import received_bytes
from harness.oracle.reference import inputs_of
from harness.oracle.tolerance import Tolerance, limit
from harness.plan.plan import Plan, to_json
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.reader import from_json
from harness.plan.sizes import leg_bytes, piece_bytes, wire_bytes
from harness.plan.tasks import Scope, Tensor, legs_of
from harness.prepare.verified_plans import planned, roundings_sent
from harness.records.config import Config, Where
from harness.sweep.simulate_cells import simulate_cell
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import DIRECT, STRATEGIES, strategy
from tests.support import layer_config, layer_problem

GRADIENTS = {Tensor.DQ_PART, Tensor.DK_PART, Tensor.DV_PART}


def problem(dtype: Dtype = Dtype.BFLOAT16, *, scope: Scope = Scope.LAYER) -> Problem:
    layer = layer_problem("causal", 41, (8, 2), dims=(6, 10), dtype=dtype, cp=4)
    return layer if scope is Scope.LAYER else replace(layer, hidden=None, rotary=None)


def config(text: str, dtype: Dtype = Dtype.BFLOAT16) -> Config:
    return layer_config(text, "causal", 4, (8, 2), head_dim=6, dtype=dtype)


def backward(text: str, asked: Problem) -> Plan:
    return strategy(text).plan(asked, Direction.BACKWARD)


@pytest.mark.parametrize("name", DIRECT)
def test_rounded_sums_are_as_right_as_their_precision_allows(name: str) -> None:
    """Every result, the bytes that moved and the memory that was held."""
    for cell in check(config(f"{name}:round_sent=true")):
        assert (cell.status, cell.reason) == ("passed", "")


def test_processes_give_the_bits_of_the_local_run() -> None:
    cells = [
        replace(config(f"{name}:round_sent=true"), cp=2) for name in ("ring-classic", "ulysses")
    ]
    for cell in (cell for pair in check_group(cells, jobs=1) for cell in pair):
        assert (cell.status, cell.reason, cell.config.transport) == ("passed", "", "gloo")


@pytest.mark.parametrize("name", [name for name in DIRECT if name != "hypergraph"])
def test_partial_gradients_take_half_the_bytes_and_nothing_else_changes(name: str) -> None:
    """But for a planner that weighs bytes, whose cut they may move."""
    plain, rounded = (backward(text, problem()) for text in (name, f"{name}:round_sent=true"))
    assert plain.tasks == rounded.tasks
    sent = {True: 0, False: 0}
    for task in plain.tasks:
        for leg in legs_of(task):
            wide = sum(piece_bytes(plain, p) for p in leg.pieces if p.tensor in GRADIENTS)
            if leg.src.rank != leg.dst.rank:
                assert leg_bytes(plain, leg) - leg_bytes(rounded, leg) == wide // 2
                sent[bool(wide)] += 1
            else:
                assert leg_bytes(plain, leg) == leg_bytes(rounded, leg)
            for piece in leg.pieces:
                narrow = piece.tensor in GRADIENTS
                assert wire_bytes(rounded, piece) * (2 if narrow else 1) == piece_bytes(
                    rounded, piece
                )
    assert sent[True]
    assert sent[False]


@pytest.mark.parametrize("name", [*DIRECT, "grid:rows=2"])
def test_forward_sends_partial_outputs_and_their_lse_as_they_are_kept(name: str) -> None:
    """An lse of 8 in bfloat16 would be off by 0.03, and so would every weight."""
    joined = f"{name}{',' if ':' in name else ':'}round_sent=true"
    plain, rounded = (strategy(text).plan(problem(), Direction.FORWARD) for text in (name, joined))
    for task in plain.tasks:
        for leg in legs_of(task):
            assert leg_bytes(plain, leg) == leg_bytes(rounded, leg)


@pytest.mark.parametrize("dtype", [Dtype.FLOAT32, Dtype.FLOAT64])
def test_what_is_kept_as_it_is_sent_stays_as_it_is(dtype: Dtype) -> None:
    asked = problem(dtype)
    found = []
    for text in ("zigzag", "zigzag:round_sent=true"):
        made = planned(asked, text)
        both = run_both(made, inputs_of(asked, 5), lambda: LocalTransport(asked.cp))
        found.append((both.results, received_bytes(made.backward.plan)))
    assert found[0][1] == found[1][1]
    for name, values in found[0][0].items():
        assert torch.equal(values, found[1][0][name])


def test_rounding_is_seen_in_the_gradients_of_keys_and_not_in_the_output() -> None:
    asked = problem()
    found = []
    for text in ("ring", "ring:round_sent=true"):
        made = planned(asked, text)
        both = run_both(made, inputs_of(asked, 5), lambda: LocalTransport(asked.cp))
        found.append(both.results)
    same = {name for name, values in found[0].items() if torch.equal(values, found[1][name])}
    assert same == {"y", "dw_q", "dw_o"}


def test_a_plan_that_rounds_is_another_plan_and_comes_back_from_json() -> None:
    plain, rounded = (backward(text, problem()) for text in ("ring", "ring:round_sent=true"))
    assert from_json(to_json(rounded)) == rounded
    assert rounded.problem.round_sent
    assert rounded.hash != replace(plain, strategy=rounded.strategy).hash


@pytest.mark.parametrize("name", ["ring", "ring-classic", "allgather", "ulysses", "usp"])
def test_the_closed_form_counts_what_is_rounded(name: str) -> None:
    asked = replace(problem(scope=Scope.ATTENTION), pattern=make_pattern("full", 48))
    chosen = strategy(f"{name}:round_sent=true")
    plan = chosen.plan(asked, Direction.BACKWARD)
    form = chosen.volume(plan.problem, Direction.BACKWARD)
    assert form is not None
    assert form.received_bytes == received_bytes(plan)


def test_every_rank_that_a_sum_visits_adds_one_rounding_to_its_limit() -> None:
    plain, rounded = (
        verify(backward(text, problem())) for text in ("ring", "ring:round_sent=true")
    )
    assert (roundings_sent(plain), roundings_sent(rounded)) == (0, 4)
    tolerance = Tolerance(
        dtype=torch.bfloat16,
        head_dim=6,
        reference={},
        scales={"lse": 1.0},
        twin_errors=dict.fromkeys(("out", "dq", "dk"), 0.0),
    )
    eps = torch.finfo(torch.bfloat16).eps
    for name, more in (("out", 0), ("dq", 1), ("dk", 1)):
        limits = [limit(name, tolerance, merges=3, sent=sent) for sent in (0, 4)]
        wanted = more * (12**0.5 - 8**0.5) * eps / 2
        assert limits[1] - limits[0] == pytest.approx(wanted)


@pytest.mark.parametrize("cluster", ["h100-8x8", "h100-hamming"])
def test_the_simulator_sees_fewer_bytes(cluster: str) -> None:
    """A ring between nodes on so few tokens that its transfers are all that counts."""
    times = []
    for text in ("ring-classic", "ring-classic:round_sent=true"):
        cell = Config(
            strategy=text,
            pattern="full",
            cp=16,
            seqlen_q=2**14,
            seqlen_kv=2**14,
            heads_q=32,
            heads_kv=32,
            head_dim=128,
            dtype=Dtype.BFLOAT16,
            direction=Direction.BACKWARD,
            transport=Where.SIMULATED,
            cluster=cluster,
        )
        record = simulate_cell(cell, {})
        assert record.status == "ok", record.reason
        times.append((record.time_s, record.bytes_sent_per_rank))
    assert times[1][1] < times[0][1]
    assert times[1][0] < 0.9 * times[0][0]


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name in DIRECT])
def test_attention_alone_rounds_too(name: str) -> None:
    asked = problem(scope=Scope.ATTENTION)
    plain, rounded = (backward(text, asked) for text in (name, f"{name}:round_sent=true"))
    assert sum(received_bytes(rounded)) < sum(received_bytes(plain))

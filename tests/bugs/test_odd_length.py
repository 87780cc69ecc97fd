"""Lengths that divide nothing: no padding, so no pad token can be read, dropped or normalised."""

import pytest
import torch

from harness.attention import run_all
from harness.execute.interpreter import execute
from harness.execute.shards import collect, initial_inputs
from harness.execute.transport import LocalTransport
from harness.plan.problem import Direction, Dtype
from harness.plan.sharding import Sharding
from harness.plan.tasks import Tensor as Kind
from harness.plan.tasks import legs_of
from harness.planning.builder import PlanBuilder
from harness.planning.rings import ring_attention
from harness.verify.proof import verify
from tests.support import EVERY_STRATEGY, failures, problem, run, same_bits, tensors, wrong


def test_b002_698_tokens_on_4_ranks_need_no_padding() -> None:
    p = problem("causal", 698, (8, 1), dims=(16, 16), batch=1, dtype=Dtype.BFLOAT16, cp=4)
    assert wrong(p, "zigzag") == ""


@pytest.mark.parametrize("strategy", ["zigzag", "ring-classic"])
def test_b002_an_odd_length_repeats_bit_for_bit(strategy: str) -> None:
    for seed in range(3):
        p = problem("documents:lengths=50+7+41", 98, (8, 1), dtype=Dtype.BFLOAT16, cp=4)
        first = run(p, strategy, seed).results
        assert all(same_bits(first, run(p, strategy, seed).results) for _ in range(19))


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
@pytest.mark.parametrize("pattern", ["documents:lengths=7", "causal"])
def test_b004_one_document_of_7_tokens_on_2_ranks(pattern: str, strategy: str) -> None:
    assert wrong(problem(pattern, 7, (6, 2), cp=2), strategy) == ""


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
def test_b006_7_tokens_on_2_ranks_without_a_mask(strategy: str) -> None:
    assert wrong(problem("full", 7, (6, 2), cp=2), strategy) == ""


@pytest.mark.parametrize("strategy", ["ulysses", "usp:2x2"])
def test_b014_ulysses_takes_a_length_that_the_ranks_do_not_divide(strategy: str) -> None:
    p = problem("causal", 1023, (4, 2), dims=(8, 8), batch=1, dtype=Dtype.FLOAT32, cp=4)
    assert wrong(p, strategy) == ""


@pytest.mark.parametrize("direction", Direction)
def test_b106_a_ring_takes_shards_of_any_lengths(direction: Direction) -> None:
    p = problem("full", 18, (6, 2), cp=3)
    shards = Sharding((range(5), range(5, 12), range(12, 18)), ((0,), (1,), (2,)))
    b = PlanBuilder(p, "uneven", direction, shards, shards)
    ring_attention(b, lambda rank, step: (rank - step) % 3, lambda rank, s: ((rank - 1) % 3, s - 1))
    program = verify(b.build(), (shards.owned, shards.owned))
    sent = [leg.pieces[0] for task in program.plan.tasks for leg in legs_of(task)]
    assert {program.plan.tokens(piece) for piece in sent} == {5, 6, 7}
    q, k, v, dout = tensors(p)
    whole = {Kind.Q: q, Kind.K: k, Kind.V: v, Kind.DOUT: dout}
    if direction is Direction.BACKWARD:
        results = run_all(p, "ring", q, k, v).results
        whole |= {Kind.OUT: results["out"], Kind.LSE: results["lse"]}
    inputs = initial_inputs(program.plan, whole, range(3))
    found = execute(program, inputs, LocalTransport(3)).results
    ends = (Kind.DQ, Kind.DK, Kind.DV) if direction is Direction.BACKWARD else (Kind.OUT, Kind.LSE)
    assert failures(p, {kind.value: collect(program.plan, found, kind) for kind in ends}) == []


@pytest.mark.parametrize("strategy", EVERY_STRATEGY)
@pytest.mark.parametrize("seqlen", [1, 2, 3, 5, 9])
def test_b002_b014_fewer_tokens_than_chunks(seqlen: int, strategy: str) -> None:
    p = problem("causal", seqlen, (6, 2), batch=1, cp=4)
    assert wrong(p, strategy) == ""
    assert torch.isfinite(run(p, strategy).results["out"]).all()

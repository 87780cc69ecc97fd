"""The memory ledger: what a plan holds, in bytes, equal to the account of a run."""

from dataclasses import replace

import pytest

import strategies
from harness.check.cell import Both, run_both
from harness.execute.transport import LocalTransport
from harness.memory.ledger import ledger
from harness.oracle.inputs import make_inputs
from harness.plan.problem import Direction, Dtype
from harness.plan.tasks import Tensor
from harness.prepare.verified_plans import planned
from harness.records.config import Config

CELL = Config(
    strategy="ring",
    pattern="causal",
    cp=4,
    seqlen_q=61,
    seqlen_kv=61,
    heads_q=6,
    heads_kv=2,
    head_dim=5,
    batch=2,
    dtype=Dtype.BFLOAT16,
)
VARIANTS = ("usp:ring_inside=true", "allgather:placement=zigzag", "ulysses:prune=false")


def run(config: Config) -> Both:
    plans = planned(config.problem, config.strategy)
    tensors = make_inputs(config.problem, 0)
    return run_both(plans, tensors, lambda: LocalTransport(config.cp), account=True)


@pytest.mark.parametrize("strategy", [*map(strategies.quick, strategies.STRATEGIES), *VARIANTS])
@pytest.mark.parametrize("pattern", ["causal", "star", "documents:lengths=17+1+43"])
@pytest.mark.parametrize("dtype", [Dtype.FLOAT64, Dtype.BFLOAT16])
def test_the_ledger_equals_the_account_to_the_byte(
    strategy: str, pattern: str, dtype: Dtype
) -> None:
    config = replace(CELL, strategy=strategy, pattern=pattern, dtype=dtype)
    plans, both = planned(config.problem, strategy), run(config)
    for direction, program in (
        (Direction.FORWARD, plans.forward),
        (Direction.BACKWARD, plans.backward),
    ):
        expected = ledger(program)
        assert list(both.peaks[direction]) == [*expected.peak_bytes, *expected.host_peak_bytes]


def test_one_rank_that_does_all_holds_inputs_and_results_only() -> None:
    lone = replace(CELL, cp=1, pattern="full", heads_kv=6, dtype=Dtype.FLOAT32)
    found = ledger(planned(lone.problem, lone.strategy).forward)
    tensor = 2 * 6 * 61 * 5 * 4
    assert found.inputs_bytes == (3 * tensor,)
    lse = 2 * 6 * 61 * 4
    assert found.peak_bytes == (4 * tensor + lse,)


def test_a_gathered_plan_holds_more_than_a_ring_and_a_ring_less_with_more_ranks() -> None:
    def peak(strategy: str, cp: int) -> int:
        config = replace(
            CELL, strategy=strategy, cp=cp, pattern="full", seqlen_q=240, seqlen_kv=240
        )
        return max(ledger(planned(config.problem, strategy).forward).peak_bytes)

    assert peak("allgather", 6) > peak("ring", 6)
    assert peak("ring", 8) < peak("ring", 3)


def test_a_sum_that_is_rounded_once_has_the_precision_of_its_values() -> None:
    """Of Ulysses a tile is all of out, dq, dk and dv; on two ranks of a ring each has two parts.

    Of a ring's rank 0, what rank 1 adds to dk and dv comes by a merge; what rank 1 makes of them
    is sent, and so kept wide. On three ranks, rank 2 adds up three parts of out and dq.
    """
    problem = replace(CELL, cp=2).problem
    grads = (Tensor.DQ_PART, Tensor.DK_PART, Tensor.DV_PART)
    for text in ("ulysses", "ring"):
        both = planned(problem, text)
        for program, tensors in ((both.forward, (Tensor.OUT_PART,)), (both.backward, grads)):
            pieces = [program.slabs[slab] for slab in program.narrow]
            kinds = [(place.rank, piece.tensor) for _, place, piece in pieces]
            assert sorted(kinds) == sorted((r, t) for r in range(2) for t in tensors)
    three = planned(replace(problem, cp=3), "ring")
    for program, tensor in ((three.forward, Tensor.OUT_PART), (three.backward, Tensor.DQ_PART)):
        of_rank = {
            slab
            for slab, place, piece in program.slabs
            if (place.rank, piece.tensor) == (2, tensor)
        }
        assert of_rank
        assert not program.narrow & of_rank
    wide = replace(problem, dtype=Dtype.FLOAT32)
    assert not planned(wide, "ulysses").backward.narrow

"""Two small scripts of a tutorial on ring attention, done over by the harness.

`ring_attention_sim` attends 4 tokens of width 2, full and block by block; `sp_budget` counts the
memory and traffic of 131072 tokens of width 8192 on 8 ranks. Their printed figures must come out.
"""

import math

import pytest
import torch

from harness.execute.interpreter import execute
from harness.execute.shards import collect, initial_inputs
from harness.execute.transport import LocalTransport
from harness.explain.volumes import received_bytes
from harness.plan.grid import steps_of
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.sizes import piece_bytes
from harness.plan.tasks import Tensor, Tile
from harness.planning.builder import balanced_heads
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import strategy

GIB = 2**30
Rows = list[list[float]]
Q: Rows = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 1.0]]
K: Rows = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -1.0]]
V: Rows = [[1.0, 2.0], [2.0, 0.0], [0.0, 3.0], [4.0, 1.0]]
PRINTED = ("1.713718770", "1.717687378")


def full_attention(q: Rows, k: Rows, v: Rows, added: float = 0.0, causal: bool = False) -> Rows:
    """Softmax attention in plain Python, every score raised by `added`."""
    outputs = []
    for i, query in enumerate(q):
        seen = i + 1 if causal else len(k)
        scores = [
            sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(len(query)) + added
            for key in k[:seen]
        ]
        peak = max(scores)
        weights = [math.exp(score - peak) for score in scores]
        outputs.append(
            [
                sum(w * row[j] for w, row in zip(weights, v[:seen], strict=True)) / sum(weights)
                for j in range(2)
            ]
        )
    return outputs


def run(text: str, cp: int, q: Rows, k: Rows, pattern: str = "full") -> Rows:
    """Attend through a plan of the strategy on `cp` ranks of this process."""
    problem = Problem(
        pattern=make_pattern(pattern, len(q)),
        heads_q=1,
        heads_kv=1,
        head_dim=len(q[0]),
        head_dim_v=2,
        dtype=Dtype.FLOAT64,
        cp=cp,
    )
    plan = strategy(text).plan(problem, Direction.FORWARD)
    whole = {
        tensor: torch.tensor(rows, dtype=torch.float64)[None, None]
        for tensor, rows in ((Tensor.Q, q), (Tensor.K, k), (Tensor.V, V))
    }
    inputs = initial_inputs(plan, whole, range(cp))
    done = execute(verify(plan), inputs, LocalTransport(cp))
    rows: Rows = collect(plan, done.results, Tensor.OUT)[0, 0].tolist()
    return rows


def assert_close(expected: Rows, actual: Rows) -> None:
    assert all(math.isfinite(x) for row in actual for x in row)
    for want, got in zip(expected, actual, strict=True):
        assert want == pytest.approx(got, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("cp", [4, 2, 1])
def test_a_ring_of_any_block_prints_what_the_script_prints(cp: int) -> None:
    ring = run("ring", cp, Q, K)

    assert tuple(f"{x:.9f}" for x in full_attention(Q, K, V)[0]) == PRINTED
    assert tuple(f"{x:.9f}" for x in ring[0]) == PRINTED
    assert_close(full_attention(Q, K, V), ring)


@pytest.mark.parametrize("cp", [4, 2, 1])
def test_scores_raised_by_1000_change_nothing(cp: int) -> None:
    """A third column adds 1000 to each score; q grows so that the scale of 3 columns is that of 2.

    exp(1000) is not finite, so this fails where the largest score is not taken off first.
    """
    q = [[*(x * math.sqrt(3 / 2) for x in row), math.sqrt(3)] for row in Q]
    k = [[*row, 1000.0] for row in K]
    ring = run("ring", cp, q, k)

    assert tuple(f"{x:.9f}" for x in ring[0]) == PRINTED
    for want, got in zip(full_attention(Q, K, V, added=1000.0), ring, strict=True):
        assert want == pytest.approx(got, rel=1e-11)  # scores of 1000 have 1e-13 left


@pytest.mark.parametrize("cp", [4, 2, 1])
@pytest.mark.parametrize("text", ["ring", "zigzag", "stripe", "allgather", "double_ring:inner=1"])
def test_a_causal_ring_masks_by_global_positions(text: str, cp: int) -> None:
    expected = full_attention(Q, K, V, causal=True)

    assert_close(expected, run(text, cp, Q, K, "causal"))
    assert expected[2] != full_attention(Q[2:], K[2:], V[2:], causal=True)[0]  # by local ones


def budget(tokens: int = 131072, ranks: int = 8) -> Problem:
    return Problem(
        pattern=make_pattern("full", tokens),
        heads_q=64,
        heads_kv=64,
        head_dim=128,
        dtype=Dtype.BFLOAT16,
        cp=ranks,
    )


def sharded_gib(problem: Problem) -> float:
    """One [L, d] tensor on one rank: its q."""
    plan = strategy("ring").plan(problem, Direction.FORWARD)
    sizes = [
        piece_bytes(plan, piece)
        for place, piece in plan.initial
        if place.rank == 0 and piece.tensor is Tensor.Q
    ]
    return sum(sizes) / GIB


def test_a_sequence_tensor_shrinks_8_times_on_8_ranks() -> None:
    replicated, sharded = sharded_gib(budget(ranks=1)), sharded_gib(budget())

    assert f"{replicated:.2f}" == "2.00"
    assert f"{sharded:.2f}" == "0.25"
    assert f"{replicated / sharded:.1f}" == "8.0"


def test_ulysses_gives_each_of_8_ranks_8_of_64_heads() -> None:
    assert [heads.bit_count() for heads in balanced_heads(budget(), 8)] == [8] * 8


def test_the_ring_takes_8_rounds_of_16384_local_queries() -> None:
    plan = strategy("ring").plan(budget(), Direction.FORWARD)
    tiles = [task for task in plan.tasks if isinstance(task, Tile)]

    assert max(steps_of(plan)) + 1 == 8
    assert {plan.tokens(tile.reads[0]) for tile in tiles} == {16384}


def test_the_ring_brings_each_rank_3_5_gib_of_keys_and_values() -> None:
    plan = strategy("ring").plan(budget(), Direction.FORWARD)

    assert {f"{received / GIB:.2f}" for received in received_bytes(plan)} == {"3.50"}


def test_weak_scaling_keeps_the_shard_and_grows_the_traffic() -> None:
    """16384 tokens to a rank: 0.25 GiB of each tensor, and 0.5 GiB of K and V from each other."""
    for ranks in (1, 2, 4, 8):
        problem = budget(16384 * ranks, ranks)
        plan = strategy("ring").plan(problem, Direction.FORWARD)

        assert sharded_gib(problem) == 0.25
        assert {0.5 * (ranks - 1)} == {received / GIB for received in received_bytes(plan)}

"""Lower bounds: by hand, equal for all strategies where they must be, and tight where they can."""

from dataclasses import replace

import pytest

from harness.cluster.machine import Link, Runtime
from harness.cluster.presets import cluster, h100
from harness.errors import UnsupportedError
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.residency import Program
from harness.simulate.bounds import bounds, problem_bound_s
from harness.simulate.queues import Stream
from harness.simulate.simulator import simulate
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import STRATEGIES, quick, strategy

PATTERNS = ("full", "causal", "strided", "global_local", "star", "streaming", "window:left=100")


def problem(pattern: str = "causal", cp: int = 8, seqlen: int = 4096) -> Problem:
    return Problem(
        pattern=make_pattern(pattern, seqlen),
        heads_q=8,
        heads_kv=8,
        head_dim=64,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )


def planned(name: str, p: Problem, direction: Direction = Direction.FORWARD) -> Program:
    return verify(strategy(name).plan(p, direction))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("direction", list(Direction))
def test_every_strategy_has_the_same_balanced_bound(pattern: str, direction: Direction) -> None:
    p = problem(pattern)
    expected = problem_bound_s(p, direction, cluster("h100-8x8"))
    products = 2 if direction is Direction.FORWARD else 5
    flops = p.pattern.total_area * 8 * products * 2 * 64
    speed = 989.4e12 * (0.42 if direction is Direction.FORWARD else 0.35)

    assert expected == pytest.approx(flops / speed / 8, rel=1e-12)
    for name in map(quick, STRATEGIES):
        limits = bounds(planned(name, p, direction), cluster("h100-8x8"))
        assert limits.balanced_s == pytest.approx(expected, rel=1e-12), name
        assert limits.balanced_s <= limits.compute_s


def test_bounds_of_a_ring_by_hand() -> None:
    base = h100(8)
    gpu = replace(
        base.gpu,
        flops_per_s=1e12,
        efficiency_forward=1.0,
        memory_bandwidth_bytes_per_s=1e30,
        kernel_start_s=0.0,
    )
    link = Link(bandwidth_bytes_per_s=1e9, latency_s=1e-6)
    machine = replace(base, gpu=gpu, nvlink=link, gpus_per_node=4)
    limits = bounds(planned("ring", problem("causal", 4)), machine)
    # 1024 tokens per rank, 8 heads of 64. A block has 1024 * 1024 * 8 * 256 flops = 2147.48 us,
    # the diagonal 1025 / 2048 of it; keys and values take 2 * 1024 * 8 * 64 * 2 bytes, 2097.152 us.
    block, hop = 1024 * 1024 * 8 * 256 / 1e12, 1e-6 + 2097152 / 1e9

    assert limits.compute_s == pytest.approx(block * (3 + 1025 / 2048), rel=1e-9)
    # Rank 2 sends on the keys of ranks 2, 1 and 0.
    assert limits.links_s == {
        Stream.NVLINK_OUT: pytest.approx(3 * hop),
        Stream.NVLINK_IN: pytest.approx(3 * hop),
    }
    # Rank 3 folds blocks in one after another: its diagonal and three more, or what is left of
    # them once keys have come k hops.
    chain = max(block * (3 + 1025 / 2048), *(k * hop + (4 - k) * block for k in (1, 2, 3)))
    assert limits.critical_path_s == pytest.approx(chain, rel=1e-9)
    assert limits.bound_s == pytest.approx(max(limits.compute_s, 3 * hop, chain))
    work = 4 * block * 1025 / 2048 + 6 * block
    assert limits.balanced_s == pytest.approx(work / 4, rel=1e-9)
    assert limits.serial_s == pytest.approx(work + 6 * hop, rel=1e-9)


def test_one_rank_reaches_its_bound() -> None:
    program = planned("ring", problem(cp=1))
    limits = bounds(program, cluster("h100-8x8"))

    assert simulate(program, cluster("h100-8x8")).makespan_s == pytest.approx(
        limits.bound_s, rel=1e-12
    )
    assert limits.serial_s == pytest.approx(limits.bound_s, rel=1e-12)
    assert limits.links_s == {}


def test_the_hosts_launches_count_in_the_eager_runtime() -> None:
    program = planned("ring", problem(cp=4, seqlen=64))
    both = (Runtime.GRAPH, Runtime.EAGER)
    graph, eager = (bounds(program, cluster("h100-8x8"), runtime) for runtime in both)

    assert eager.critical_path_s > graph.critical_path_s
    assert eager.serial_s > graph.serial_s
    assert eager.compute_s == graph.compute_s


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="its 8 GPUs"):
        problem_bound_s(problem(cp=16), Direction.FORWARD, cluster("h100-1x8"))

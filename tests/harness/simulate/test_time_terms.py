"""Terms of a plan's time: they add up to it, and each shows what it is named for."""

from dataclasses import replace

import pytest

from harness.cluster.machine import LinkClass, Runtime
from harness.cluster.presets import cluster, h100
from harness.plan.problem import Direction, Dtype, Problem
from harness.plan.residency import Program
from harness.report.time_bar import terms_text
from harness.simulate.simulator import simulate
from harness.simulate.time_terms import TimeTerms, time_terms
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import STRATEGIES, quick, strategy

FULL, QUICK = cluster("h100-hamming"), replace(h100(3), name="quick", gpus_per_node=4)


def made(name: str, direction: Direction, pattern: str = "causal", cp: int = 6) -> Program:
    problem = Problem(
        pattern=make_pattern(pattern, 5001),
        heads_q=12,
        heads_kv=6,
        head_dim=64,
        dtype=Dtype.BFLOAT16,
        cp=cp,
    )
    return verify(strategy(name).plan(problem, direction))


@pytest.mark.parametrize("name", [name for name in STRATEGIES if not name.startswith("ultraattn")])
@pytest.mark.parametrize("direction", Direction)
def test_terms_add_up_to_the_simulated_time(name: str, direction: Direction) -> None:
    program = made(quick(name), direction, "full" if name == "dynamic" else "causal")
    for machine in (FULL, QUICK):
        for runtime in Runtime:
            terms = time_terms(program, machine, runtime)
            trace = simulate(program, machine, runtime=runtime)
            assert terms.time_s == pytest.approx(trace.makespan_s, rel=1e-12)
            # Launches and crowding may let jobs meet more luckily; all others are differences of
            # bounds, each of more than the one before.
            others = dict(terms.parts)
            del others["launch"], others["crowding"]
            assert min(others.values()) >= -1e-12 * terms.time_s
            assert terms.any_plan.bound_s <= terms.time_s


def test_who_has_more_work_shows_as_imbalance() -> None:
    even, uneven = (time_terms(made(name, Direction.FORWARD), QUICK) for name in ("zigzag", "ring"))
    assert even.imbalance_s < 0.01 * even.even_s < 0.5 * even.even_s < uneven.imbalance_s
    assert even.even_s == uneven.even_s


def test_a_slow_link_shows_under_its_class_and_a_free_one_does_not() -> None:
    program = made("ring", Direction.FORWARD, "full")
    slow = replace(QUICK, nic=replace(QUICK.nic, bandwidth_bytes_per_s=1e8))
    terms, before = time_terms(program, slow), time_terms(program, QUICK)
    assert terms.links_s[LinkClass.NIC] > 100 * before.links_s[LinkClass.NIC] >= 0
    assert terms.links_s[LinkClass.NVLINK] == before.links_s[LinkClass.NVLINK]
    assert set(terms.links_s) == {LinkClass.NVLINK, LinkClass.NIC}
    inside = time_terms(made("ring", Direction.FORWARD, cp=3), QUICK)
    assert set(inside.links_s) == {LinkClass.NVLINK}


def test_gathers_before_the_first_kernel_are_links_and_not_order() -> None:
    # k and v cross the same ports one after the other, and the tile waits for both.
    terms = time_terms(made("allgather:placement=zigzag", Direction.FORWARD), FULL)
    assert terms.order_s < 0.01 * sum(terms.links_s.values())


def test_small_kernels_and_merges_show() -> None:
    ring, gather = (
        time_terms(made(name, Direction.FORWARD, "full"), FULL) for name in ("ring", "allgather")
    )
    assert ring.kernels_s > gather.kernels_s > 0
    assert ring.merges_s > gather.merges_s


def test_hosts_that_launch_show_as_launch() -> None:
    program = made("ring", Direction.FORWARD)
    graph, *others = (time_terms(program, QUICK, runtime) for runtime in Runtime)
    assert graph.launch_s == 0
    for eager in others:
        assert eager.launch_s > 0
        assert {**graph.parts, "launch": 0} == {**eager.parts, "launch": 0}


def test_the_bar_is_stacked_and_names_both_bounds() -> None:
    terms = time_terms(made("ring", Direction.FORWARD), QUICK)
    assert isinstance(terms, TimeTerms)
    shown = terms_text(terms, "quick", 80).splitlines()
    lines = shown[-len(terms.parts) :]
    first = " ".join(line.strip() for line in shown[: -len(terms.parts)])
    assert "on quick" in first
    assert "no plan takes less than" in first
    assert first.endswith(")")
    assert [line.split()[0] for line in lines] == [name.split()[0] for name in terms.parts]
    assert max(map(len, shown)) <= 80
    end = 28
    for line in lines:
        if "█" in line:
            assert line.index("█") == end
            end = len(line)
    assert end > 70
    assert terms.as_json()["terms_s"] == terms.parts

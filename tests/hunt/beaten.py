"""Plans of random problems on random clusters, against the bound that no plan may beat.

Links are slowed at random and have no latency, so that they decide about half of the bounds; nodes
have 2 to 8 GPUs, so that small plans cross them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from harness.cluster.link_model import Curve
from harness.cluster.machine import Cluster, Runtime
from harness.cluster.presets import cluster
from harness.errors import UnsupportedError
from harness.plan.problem import Direction, Dtype, Problem
from harness.prepare.planner_context import context_on
from harness.simulate.bounds import AnyPlanBound, any_plan_bound, most_owned
from harness.simulate.simulator import simulate
from harness.verify.proof import verify
from patterns import make_pattern
from strategies import STRATEGIES, quick, strategy

_PATTERNS = (
    *("full", "causal", "strided", "global_local", "star", "streaming"),
    *(
        "window:left=40",
        "window:left=7,right=3",
        "prefix_lm:length=30",
        "causal_blockwise:block=32,local=1",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """A plan's time beside two bounds: of this project's dealings, and of the plan's own."""

    text: str
    time_s: float
    any_dealing: AnyPlanBound
    own_dealing: AnyPlanBound

    @property
    def won(self) -> bool:
        """Whether the plan beats a bound, which cannot be."""
        return self.time_s < max(self.any_dealing.bound_s, self.own_dealing.bound_s)


def races(problems: int, seed: int, most: int) -> Iterator[Race]:
    """Run plans of random problems: `most` strategies of each that support it."""
    for number in range(problems):
        rng = Random(f"{seed} {number}")
        problem, machine = _problem(rng), _machine(rng)
        direction, runtime = rng.choice(list(Direction)), rng.choice(list(Runtime))
        run = 0
        for name in map(quick, rng.sample(list(STRATEGIES), len(STRATEGIES))):
            try:
                plan = strategy(name).plan(problem, direction, context_on(machine))
            except (UnsupportedError, ValueError):
                continue
            trace = simulate(verify(plan), machine, runtime=runtime)
            yield Race(
                text=f"{number}: {name} {direction} {runtime} {machine.name} {problem}",
                time_s=trace.makespan_s,
                any_dealing=any_plan_bound(problem, direction, machine),
                own_dealing=any_plan_bound(problem, direction, machine, most_owned(plan)),
            )
            run += 1
            if run == most:
                break


def _problem(rng: Random) -> Problem:
    kv_heads = rng.choice((1, 2, 3, 4, 8, 16))
    return Problem(
        pattern=make_pattern(rng.choice(_PATTERNS), rng.choice((97, 200, 509, 1024, 3001))),
        heads_q=kv_heads * rng.choice((1, 2, 4)),
        heads_kv=kv_heads,
        head_dim=rng.choice((8, 32, 64)),
        head_dim_v=rng.choice((0, 16)),
        batch=rng.choice((1, 2)),
        dtype=rng.choice((Dtype.BFLOAT16, Dtype.FLOAT32)),
        cp=rng.choice((2, 3, 4, 6, 8, 12)),
        round_sent=rng.random() < 0.3,
    )


def _machine(rng: Random) -> Cluster:
    machine = cluster(rng.choice(("h100-hamming", "h100-8x8", "a800")))
    slower, far, width = rng.choice((1, 1e-2, 1e-4)), rng.choice((1, 0.1)), rng.choice((2, 3, 4, 8))
    shape = {"nodes": 8, "gpus_per_node": width}
    near_bps, far_bps = (
        link.bandwidth_bytes_per_s * slower for link in (machine.nvlink, machine.nic)
    )
    machine = replace(
        machine,
        **shape,
        nvlink=replace(machine.nvlink, bandwidth_bytes_per_s=near_bps, latency_s=0.0),
        nic=replace(machine.nic, bandwidth_bytes_per_s=far_bps * far, latency_s=0.0),
    )
    if machine.fitted is None:
        return machine
    links = machine.fitted.links
    slowed = replace(
        links,
        near=_slowed(links.near, slower),
        near_one_way=_slowed(links.near_one_way, slower),
        near_collective=_slowed(links.near_collective, slower),
        far=_slowed(links.far, slower * far),
        far_alone=_slowed(links.far_alone, slower * far),
    )
    fitted = replace(
        machine.fitted,
        id=f"{machine.name} {slower} {far} {width}",
        links=slowed,
        hardware=replace(machine.fitted.hardware, **shape),
    )
    return replace(machine, fitted=fitted)


def _slowed(curve: Curve, factor: float) -> Curve:
    return replace(
        curve,
        latency_s=0.0,
        large_latency_s=0.0,
        small_bytes_per_s=curve.small_bytes_per_s * factor,
        bytes_per_s=curve.bytes_per_s * factor,
    )

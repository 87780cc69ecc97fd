"""Predicted seconds of attention, and quotients of them. A setting gives the problem and the runs.

Beside what `counted` reads: `cluster`, a calibrated one; `runtime`, `graph` or `eager-torch`;
`patterns`, over which runs take turns; `gpus_per_node` where ranks lie otherwise than on the
cluster; `kernel_tflops`, the rate of a long kernel that the source measured, where its kernel is
not the one that the cluster was measured with.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean
from typing import Any

from harness.base.cache import cache_folder
from harness.cluster.calibration import Calibration
from harness.cluster.machine import Runtime
from harness.cluster.presets import cluster
from harness.errors import UnsupportedError
from harness.plan.problem import Direction
from harness.plan.sizes import leg_bytes, problem_flops
from harness.plan.tasks import Collective, legs_of
from harness.prepare.scalable_plan_cache import structure_of
from harness.records.config import Config, Where
from harness.reproduce.claims import Ours
from harness.reproduce.counted import plan_in, problem_in
from harness.reproduce.speedup_times import class_error
from harness.simulate.calibrated import pricer

ClaimSetting = Mapping[str, Any]
_BOTH = "both"
_NEAR = 1.02
"""How near to each other two lengths are when they are called one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRun:
    """Predicted time of one run.

    Attributes:
        seconds: Of all its directions.
        expected_error: Mean share by which plans of its class missed; None if none was measured.
    """

    seconds: float
    expected_error: float | None


def run_in(setting: ClaimSetting, name: str = "", runtime: str = "") -> PredictedRun:
    """Predict the run of a setting, or the same with another strategy or runtime.

    Raises:
        UnsupportedError: The strategy cannot do the problem.
    """
    direction = setting.get("direction", Direction.FORWARD.value)
    ways = tuple(Direction) if direction == _BOTH else (Direction(direction),)
    fitted = _fitted(setting["cluster"], setting.get("gpus_per_node"), setting.get("kernel_tflops"))
    eager = Runtime(runtime or setting["runtime"]).eager
    patterns = setting.get("patterns", [setting.get("pattern", "causal")])
    chosen = name or setting["strategy"]
    known = [
        fmean(
            _run(_config({**setting, "pattern": p}, chosen, way, eager), fitted) for p in patterns
        )
        for way in ways
    ]
    errors = [class_error(fitted, setting["cp"], way, eager=eager) for way in ways]
    worst = None if None in errors else max(error for error in errors if error is not None)
    return PredictedRun(seconds=sum(known), expected_error=worst)


@lru_cache
def _fitted(name: str, per_node: int | None, kernel_tflops: float | None) -> Calibration:
    fitted = cluster(name).fitted
    assert fitted is not None, f"{name} has datasheet numbers"
    if per_node is not None:
        fitted = replace(fitted, hardware=replace(fitted.hardware, gpus_per_node=per_node))
    if kernel_tflops is not None:
        kernels, rate = fitted.kernels, kernel_tflops * 1e12
        forward = replace(kernels.forward, flops_per_s=rate)
        backward = replace(kernels.backward, flops_per_s=rate)
        fitted = replace(fitted, kernels=replace(kernels, forward=forward, backward=backward))
    return fitted


def _config(setting: ClaimSetting, name: str, direction: Direction, eager: bool) -> Config:
    problem = problem_in(setting)
    return Config(
        strategy=name,
        pattern=setting.get("pattern", "causal"),
        cp=problem.cp,
        seqlen_q=problem.seqlen_q,
        seqlen_kv=problem.seqlen_kv,
        heads_q=problem.heads_q,
        heads_kv=problem.heads_kv,
        head_dim=problem.head_dim,
        batch=problem.batch,
        dtype=problem.dtype,
        direction=direction,
        transport=Where.SIMULATED,
        cluster=setting["cluster"],
        runtime=Runtime.EAGER if eager else Runtime.GRAPH,
    )


@lru_cache(maxsize=256)
def _run(config: Config, fitted: Calibration) -> float:
    made = structure_of(config, fitted, cache_folder() / "structures")
    eager = config.runtime is Runtime.EAGER
    prices = pricer(config.problem, config.direction, fitted, eager=eager)
    return prices.seconds_of(made.shape)


def layer_milliseconds(setting: ClaimSetting) -> Ours:
    """Time of attention of one layer, ms."""
    run = run_in(setting)
    return Ours(value=run.seconds * 1e3, expected_error=run.expected_error)


def rate(setting: ClaimSetting) -> Ours:
    """Useful TFLOP/s of a GPU; unmasked pairs only."""
    run = run_in(setting)
    problem = problem_in(setting)
    name = setting.get("direction", Direction.FORWARD.value)
    ways = tuple(Direction) if name == _BOTH else (Direction(name),)
    flops = sum(problem_flops(problem, way) for way in ways)
    return Ours(value=flops / problem.cp / run.seconds / 1e12, expected_error=run.expected_error)


def per_second(setting: ClaimSetting) -> Ours:
    """Runs in a second; `times` runs are one."""
    run = run_in(setting)
    count = setting.get("times", 1)
    return Ours(value=1 / run.seconds / count, expected_error=run.expected_error)


def share_of_one_gpu(setting: ClaimSetting) -> Ours:
    """Speed over that of the kernel alone, which attends the tokens of one GPU `cp` times."""
    run = run_in(setting)
    one = {"cp": 1, "seqlen": setting["seqlen"] // setting["cp"]}
    if "patterns" in setting:
        one["patterns"] = setting["patterns_of_one"]
    alone = run_in({**setting, **one}, runtime=Runtime.GRAPH.value)
    fair = run_in(setting, runtime=Runtime.GRAPH.value)
    kernel_s = alone.seconds * setting["cp"]
    return Ours(
        value=kernel_s / run.seconds,
        expected_error=run.expected_error,
        note=f"{kernel_s / fair.seconds:.1%} in a captured graph",
    )


def times_faster(setting: ClaimSetting) -> Ours:
    """Time with `other` over the time with `strategy`; `fair`: with the fastest of `rivals`."""
    own, other = run_in(setting), run_in(setting, setting["other"])
    graph = Runtime.GRAPH.value
    rivals = dict(_rivals(setting, graph))
    rival = min(rivals, key=lambda name: rivals[name])
    return Ours(
        value=other.seconds / own.seconds,
        fair=rivals[rival] / run_in(setting, runtime=graph).seconds,
        rival=rival,
        expected_error=_summed(own.expected_error, other.expected_error),
    )


def _rivals(setting: ClaimSetting, runtime: str) -> Iterable[tuple[str, float]]:
    for name in setting["rivals"]:
        with suppress(UnsupportedError):  # one head cannot be shared by ranks
            yield name, run_in(setting, name, runtime).seconds


def over_other(setting: ClaimSetting) -> Ours:
    """Speed of `strategy` over that of `other`, both as they were run."""
    own, other = run_in(setting), run_in(setting, setting["other"])
    return Ours(
        value=other.seconds / own.seconds,
        expected_error=_summed(own.expected_error, other.expected_error),
    )


def is_faster(setting: ClaimSetting) -> Ours:
    """1 if `strategy` is faster than `other`, else 0."""
    quotient = over_other(setting).value
    return Ours(value=float(quotient > 1), note=f"by {quotient - 1:+.1%}")


def equal_share(setting: ClaimSetting) -> Ours:
    """Share of new tokens at which `strategy` and `other` take as long, to a fiftieth.

    `strategy` is taken to be the faster one of fewer tokens. 0 where it is never faster.
    """
    keys, cp = setting["seqlen_kv"], setting["cp"]
    low, high = cp, keys
    while high / low > _NEAR:
        middle = round((low * high) ** 0.5 / cp) * cp
        if middle in (low, high):
            break
        ahead = over_other({**setting, "seqlen": middle}).value > 1
        low, high = (middle, high) if ahead else (low, middle)
    return Ours(value=0.0 if low == cp else high / keys)


def step_part(setting: ClaimSetting) -> Ours:
    """A part of a ring's step between nodes, us: `send and receive`, `attention`, `all-to-all`."""
    problem, plan = problem_in(setting), plan_in(setting)
    fitted = _fitted(setting["cluster"], setting["gpus_per_node"], setting["kernel_tflops"])
    if setting["part"] == "attention":
        tile = {
            "seqlen": problem.seqlen_q // problem.cp,
            "seqlen_kv": problem.seqlen_kv // problem.cp,
        }
        kernel = run_in(
            {**setting, **tile, "cp": 1, "pattern": "full"}, runtime=Runtime.GRAPH.value
        )
        return Ours(value=kernel.seconds * 1e6)
    collective = setting["part"] == "all-to-all"
    sizes = [
        sum(leg_bytes(plan, leg) for leg in legs_of(task) if leg.dst.rank == 0)
        for task in plan.tasks
        if isinstance(task, Collective) is collective and legs_of(task)
    ]
    return Ours(value=fitted.links.far.seconds(max(sizes)) * 1e6)


def _summed(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other

"""How well predictions do on measured runs: errors of times, and the choice between strategies.

Errors are signed shares of the measured time. What a user buys is the choice: **regret** is the
measured time of the predicted best over that of the measured best, less one; a pair is **reversed**
if its order is predicted wrongly although its times differ by more than both errors.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from harness.report.predictions import error_spread
from harness.reproduce.case import Case

Predicted = Sequence[tuple[Case, float]]
"""Cases with their predicted seconds."""
LONG = 65536  # tokens: from here on a run waits for its GPU, not for its host


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of a set of runs, shares of the measured times.

    Attributes:
        n: Runs.
        mape: Mean absolute error.
        p50: Half of the absolute errors are at most this.
        p90: Nine in ten are at most this.
        worst: The largest absolute error.
        signed: Mean error.
    """

    n: int
    mape: float
    p50: float
    p90: float
    worst: float
    signed: float


def run_errors(pairs: Predicted) -> Errors:
    """Errors of some runs, at least one."""
    spread = error_spread([seconds / case.measured_s - 1 for case, seconds in pairs])
    return Errors(
        n=len(pairs),
        mape=spread.mean,
        p50=spread.p50,
        p90=spread.p90,
        worst=spread.worst,
        signed=spread.signed,
    )


SetKey = tuple[str, str, int, str, str, str]


def set_key(case: Case) -> SetKey:
    """GPU, kernel, nodes, pattern, direction and strategy, with its mode if that is not normal."""
    label = case.strategy + ("" if case.mode == "normal" else f" {case.mode}")
    return case.gpu, case.kernel, case.nodes, case.pattern, case.direction, label


def sets_of(pairs: Predicted) -> Mapping[SetKey, Predicted]:
    """Runs by `set_key`, in its order."""
    found: defaultdict[SetKey, list[tuple[Case, float]]] = defaultdict(list)
    for case, seconds in pairs:
        found[set_key(case)].append((case, seconds))
    return dict(sorted(found.items()))


# The choice between strategies ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeasuredStrategy:
    """A strategy with its options, measured on a problem.

    Attributes:
        label: The strategy.
        measured_s: The best of its measured times.
        predicted_s: Its predicted time.
        error: Expected share of error: the mean of its set.
    """

    label: str
    measured_s: float
    predicted_s: float
    error: float


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """The choice between the strategies that were measured on a problem.

    Attributes:
        gpu: Label of the GPU model.
        kernel: The attention kernel.
        nodes: How many.
        regret: Measured time of the predicted best over that of the measured best, less one.
        hit: Whether these are the same.
        compared: Pairs whose measured times differ by more than both errors.
        reversed: Those of them whose order is predicted wrongly.
    """

    gpu: str
    kernel: str
    nodes: int
    regret: float
    hit: bool
    compared: int
    reversed: int


def strategy_choices(pairs: Predicted) -> list[StrategyChoice]:
    """The choice on every problem on which two strategies with known plans were measured."""
    known = {key: run_errors(members).mape for key, members in sets_of(pairs).items()}
    problems: defaultdict[tuple[object, ...], dict[str, MeasuredStrategy]] = defaultdict(dict)
    for case, seconds in pairs:
        if case.mode != "normal" or case.ran != case.pattern or not case.known:
            continue  # a part of a run, another pattern's code, or a plan that is not ours
        candidates = problems[_problem(case)]
        label = f"{case.strategy}/{case.rows}/{case.levels}/{case.text}"
        before = candidates.get(label)
        if before is None or case.measured_s < before.measured_s:
            error = known[set_key(case)]
            candidates[label] = MeasuredStrategy(label, case.measured_s, seconds, error)
    return [
        _choice(key, list(candidates.values()))
        for key, candidates in problems.items()
        if len(candidates) > 1
    ]


def _problem(case: Case) -> tuple[object, ...]:
    place = (case.gpu, case.kernel, case.nodes, case.gpus_per_node)
    heads = (case.heads, case.heads_kv or case.heads)
    return (*place, case.pattern, case.direction, *heads, case.seqlen_q, case.seqlen_kv)


def _choice(key: tuple[object, ...], candidates: Sequence[MeasuredStrategy]) -> StrategyChoice:
    chosen = min(candidates, key=lambda one: (one.predicted_s, one.label))
    best = min(candidates, key=lambda one: one.measured_s)
    apart = [pair for pair in combinations(candidates, 2) if _differ(*pair)]
    gpu, kernel, nodes = key[:3]
    return StrategyChoice(
        gpu=str(gpu),
        kernel=str(kernel),
        nodes=int(str(nodes)),
        regret=chosen.measured_s / best.measured_s - 1,
        hit=chosen.label == best.label,
        compared=len(apart),
        reversed=sum(1 for pair in apart if _wrong(*pair)),
    )


def _differ(one: MeasuredStrategy, other: MeasuredStrategy) -> bool:
    fast, slow = sorted((one.measured_s, other.measured_s))
    return slow / fast - 1 > max(one.error, other.error)


def _wrong(one: MeasuredStrategy, other: MeasuredStrategy) -> bool:
    return (one.measured_s < other.measured_s) != (one.predicted_s < other.predicted_s)


@dataclass(frozen=True, slots=True)
class Ranking:
    """How well strategies are ranked over many problems.

    Attributes:
        problems: With two strategies or more.
        mean: Mean regret; 0 without problems.
        worst: Largest regret.
        hits: Problems whose measured best is the predicted one.
        compared: Pairs that can be told apart.
        reversed: Those whose order is predicted wrongly.
    """

    problems: int
    mean: float
    worst: float
    hits: int
    compared: int
    reversed: int


def ranking(found: Iterable[StrategyChoice]) -> Ranking:
    """Sum choices up."""
    made = list(found)
    regrets = [choice.regret for choice in made]
    return Ranking(
        problems=len(made),
        mean=float(np.mean(regrets)) if made else 0.0,
        worst=max(regrets, default=0.0),
        hits=sum(choice.hit for choice in made),
        compared=sum(choice.compared for choice in made),
        reversed=sum(choice.reversed for choice in made),
    )


def rankings(
    found: Sequence[StrategyChoice], key: Callable[[StrategyChoice], str]
) -> dict[str, Ranking]:
    """Rankings of groups of choices, and of all."""
    groups: defaultdict[str, list[StrategyChoice]] = defaultdict(list)
    for choice in found:
        groups[key(choice)].append(choice)
    return {name: ranking(group) for name, group in sorted(groups.items())}

"""Where the simulated time of a strategy's plans goes, for `explain --strategy`."""

from collections.abc import Mapping

from harness.cluster.machine import Cluster
from harness.explain.explanation import Explanation
from harness.plan.problem import Direction
from harness.planning.chosen import Chosen
from harness.proved.plans import proved_once
from harness.report.time_bar import terms_text
from harness.simulate.time_terms import TimeTerms, time_terms

DirectionTerms = Mapping[Direction, TimeTerms]
"""Terms of the plan of each direction."""


def explained_times(chosen: Chosen, answer: Explanation, machine: Cluster) -> DirectionTerms:
    """Split the times of the plans that were explained; nothing on a cluster of too few GPUs."""
    if answer.costs is None or answer.problem.cp > machine.gpus:
        return {}
    return {
        direction: time_terms(proved_once(chosen, answer.problem, direction), machine)
        for direction in Direction
    }


def times_json(times: DirectionTerms, machine: Cluster) -> dict[str, object]:
    """Return the times as they stand under `time` in JSON."""
    return {"cluster": machine.name, **{d.value: terms.as_json() for d, terms in times.items()}}


def times_text(times: DirectionTerms, machine: Cluster, width: int) -> str:
    """Return a stacked bar of each direction."""
    bars = (f"{d.value}\n{terms_text(terms, machine.name, width)}" for d, terms in times.items())
    return "\n".join(bars)

"""Which candidates a framework runs, and what it calls them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from harness.errors import UnsupportedError
from harness.plan.problem import Problem
from harness.planning.frameworks import Framework, FrameworkSetting
from harness.planning.strategy import Context
from harness.recommend.question import Asked
from strategies import strategy

FRAMEWORKS: Mapping[str, Framework] = {each.value: each for each in Framework}
"""Frameworks by the names that a user types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkVerdict:
    """A framework's view of a candidate.

    Attributes:
        settings: Its own settings, one for each pattern; none where it refuses.
        refusal: Why it does not run the candidate; empty where it does.
    """

    settings: tuple[FrameworkSetting, ...] = ()
    refusal: str = ""


def framework_runs(framework: Framework, text: str, question: Asked) -> FrameworkVerdict:
    """Ask whether a framework runs a candidate on all patterns of a question."""
    found: list[FrameworkSetting] = []
    for problem in _problems(question):
        own = [one for one in _settings(text, problem, question) if one.framework is framework]
        if not own:
            why = f"{framework.value}: it has no such strategy, or other options"
            return FrameworkVerdict(refusal=why)
        if own[0].refusal:
            why = f"{framework.value}: {own[0].refusal} ({own[0].source})"
            return FrameworkVerdict(refusal=why)
        found += own[:1]
    return FrameworkVerdict(settings=tuple(dict.fromkeys(found)))


def settings_of(text: str, question: Asked) -> list[FrameworkSetting]:
    """Settings of all frameworks that run a candidate."""
    found = (framework_runs(framework, text, question) for framework in Framework)
    return [one for verdict in found for one in verdict.settings]


def _problems(question: Asked) -> Iterator[Problem]:
    for cell, _ in question.cells(question.candidates()[0]):
        if cell.direction is question.directions[0]:
            yield cell.problem


def _settings(text: str, problem: Problem, question: Asked) -> list[FrameworkSetting]:
    """Settings of a strategy with its choices filled in; none where it cannot do the problem."""
    context = Context(gpus_per_node=question.machine.gpus_per_node)
    attention = replace(problem, hidden=None, rotary=None)
    try:
        chosen = strategy(text)
        filled = chosen.resolved(attention, question.directions[0], context)
    except UnsupportedError:
        return []
    named = chosen.strategy.settings
    return [] if named is None else list(named(attention, filled.options))
